"""MONA: Muon of gradients that are corrected by their own acceleration.

D = G - G of the step before (0 at the first);  A <- beta A + (1 - beta) D
H = G - a A / (1 - beta), a = 0.5;  then Muon with H for G

Source: arXiv 2605.26842, from three agreeing ports and the abstract. With a = 0.5 the second step
sees the mean of both gradients, whatever beta is. State: momentum, A (`acceleration`) and the raw
gradient (`previous_grad`), each of the parameter's size; `mona_lite` keeps the last two in
bfloat16. `acceleration_beta` is 0.99, `acceleration_scale` is a.

Gradients must be clipped and accumulated alike at every step: what changes their scale is taken
for acceleration. Steps without a gradient, or left out, are not seen.

Unsettled: beta at 68B (0.975 in code, 0.99 in a text), its decay and learning rate; the scale is
that of Muon in both ports.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dmuon.algorithms import muon
from dmuon.algorithms.algorithm import Group, Matrices, StateKind, States
from dmuon.algorithms.muon import MUON
from dmuon.algorithms.stages import apply_


def corrected(grads: Sequence[Tensor], states: States, group: Group) -> list[Tensor]:
    """H, once A is advanced."""
    alpha = -group["acceleration_scale"] / (1 - group["acceleration_beta"])
    return [
        torch.add(grad, acceleration, alpha=alpha).to(grad.dtype)
        for grad, acceleration in zip(grads, states["acceleration"], strict=True)
    ]


def advance(grads: Sequence[Tensor], states: States, group: Group) -> None:
    """Advance A and the momentum, and remember the gradients."""
    beta = group["acceleration_beta"]
    for number, grad, previous, acceleration in zip(
        *(states["step"], grads, states["previous_grad"], states["acceleration"]), strict=True
    ):
        if number > 1:
            acceleration.mul_(beta).add_(grad - previous, alpha=1 - beta)
        previous.copy_(grad)
    muon.advance(corrected(grads, states, group), states, group)


def inputs(grads: Sequence[Tensor], states: States, group: Group) -> Sequence[Tensor]:
    """Muon's, of H."""
    return muon.inputs(corrected(grads, states, group), states, group)


MONA = replace(
    MUON,
    name="mona",
    state={
        **MUON.state,
        "acceleration": StateKind.ELEMENTS,
        "previous_grad": StateKind.ELEMENTS,
        "step": StateKind.COUNT,
    },
    stages=Matrices(advance, inputs, apply_),
    options={**MUON.options, "acceleration_beta": 0.99, "acceleration_scale": 0.5},
    bounds={**MUON.bounds, "acceleration_scale": math.inf},
)
MONA_LITE = replace(
    MONA,
    name="mona_lite",
    dtypes=dict.fromkeys(("acceleration", "previous_grad"), lambda _: torch.bfloat16),
)
