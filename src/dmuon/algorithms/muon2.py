"""Muon^2: Muon of a momentum that is divided by the root of its second moment.

V <- beta2 V + (1 - beta2) G o G;  W <- (1 - lr wd) W - lr s NS(U / sqrt(V + eps)), U as in Muon

Source: arXiv 2604.09967, from a transcription. V is not corrected for its start at 0, and in
float32 at least; eps is 1e-10, inside of the root. All of it but Newton-Schulz runs on the pieces,
so nothing more travels than for Muon. State: momentum, and V of the parameter's size. The paper has
`nesterov=False` and 3 Newton-Schulz steps.

Unsettled: where eps stands (the record in modded-nanogpt, pull request 266, has it outside of the
root, and `nesterov=True`), and the paper's scale, for which `adjust_lr_fn` stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dmuon.algorithms import muon
from dmuon.algorithms.algorithm import Group, Matrices, StateKind, States, at_least_float32
from dmuon.algorithms.muon import MUON
from dmuon.algorithms.stages import apply_, second_moment_

_EPS = 1e-10


def advance(grads: Sequence[Tensor], states: States, group: Group) -> None:
    """Average gradients and their squares."""
    muon.advance(grads, states, group)
    second_moment_(states["second_moment"], grads, group["beta2"])


def inputs(grads: Sequence[Tensor], states: States, group: Group) -> Sequence[Tensor]:
    """Muon's, divided."""
    ahead = muon.inputs(grads, states, group)
    roots = torch._foreach_add(list(states["second_moment"]), _EPS)
    torch._foreach_sqrt_(roots)
    return [value / root for value, root in zip(ahead, roots, strict=True)]


MUON2 = replace(
    MUON,
    name="muon2",
    state={**MUON.state, "second_moment": StateKind.ELEMENTS},
    stages=Matrices(advance, inputs, apply_),
    options={**MUON.options, "beta2": 0.95},
    dtypes={"second_moment": at_least_float32},
)
