"""AdaMuon: Muon of the sign of momentum, with a second moment of what comes out.

O = NS(sign(U)), U as in Muon;  V <- beta2 V + (1 - beta2) O o O;  P = O / (sqrt(V) + eps)
W <- (1 - lr wd) W - lr s P sqrt(min(m, n)) / |P|_F

Source: arXiv 2507.11005 v2, algorithm 1; eps 1e-8, V not corrected for its start, which would
cancel. Without the sign it is another rule, which other libraries give this name. The paper's step
`0.2 sqrt(mn) P / |P|_F` is that of `adjust_lr_fn="match_rms_adamw"`; it has `nesterov=False` (the
authors' code for GPT-2 has True) and beta2 = momentum = 0.95.

State: momentum, and V in float32, laid out as the parameter: with `shard_state` every replica keeps
all of it, since all of it is needed for the update. |P|_F takes one more collective for each
bucket, of one number for each matrix.

Unsettled: nothing for v2. v1 was another rule, and is not here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dmuon.algorithms import muon
from dmuon.algorithms.algorithm import Group, Matrices, StateKind, States, at_least_float32
from dmuon.algorithms.muon import MUON
from dmuon.algorithms.stages import apply_, second_moment_, squared_norms

_EPS = 1e-8


def inputs(grads: Sequence[Tensor], states: States, group: Group) -> Sequence[Tensor]:
    """The sign of Muon's."""
    return torch._foreach_sign(list(muon.inputs(grads, states, group)))


def after(updates: Sequence[Tensor], states: States, group: Group) -> Sequence[Tensor]:
    """Divide updates by the root of their second moment."""
    second_moment_(states["update_second_moment"], updates, group["beta2"])
    roots = torch._foreach_sqrt(list(states["update_second_moment"]))
    torch._foreach_add_(roots, _EPS)
    return [update / root for update, root in zip(updates, roots, strict=True)]


def measure(_: Sequence[Tensor], updates: Sequence[Tensor]) -> Tensor:
    """Squared norms of updates."""
    return squared_norms(updates)[:, None]


def apply(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    scale: float,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    totals: Tensor,
    shapes: Sequence[tuple[int, int]],
    group: Group,
) -> None:
    """Set the norm of updates, and take the step."""
    norms = totals[:, 0].sqrt().clamp(min=1e-10).unbind()
    factors = [math.sqrt(min(shape)) / norm for shape, norm in zip(shapes, norms, strict=True)]
    torch._foreach_mul_(list(updates), factors)
    apply_(params, updates, scale=scale, lr=lr, weight_decay=weight_decay)


ADAMUON = replace(
    MUON,
    name="adamuon",
    state={**MUON.state, "update_second_moment": StateKind.UPDATES},
    stages=Matrices(muon.advance, inputs, apply, after=after, sums=("update",), measure=measure),
    options={**MUON.options, "beta2": 0.95},
    dtypes={"update_second_moment": at_least_float32},
)
