"""MuonH, also called Hyperball: Muon on the sphere of each matrix's own radius.

With O = NS(U) of Muon, R = |W|_F and N(X) = X / max(|X|_F, 1e-10):

W <- R N((1 - lr wd) W - lr R N(O))

Source: arXiv 2606.16899, in the form of the modded-nanogpt record, marin and Paddle: R is the norm
at each step, which stays that of the start up to rounding (of the weights: in bfloat16, use
`master_weights`). Per matrix: per expert, per block of a split. The factor of `adjust_lr_fn`
cancels; decay only makes the step relatively larger, and is 0 in the source, with lr 0.018.

State: momentum. The norms and <W, O> take one more collective for each bucket, of three numbers for
each matrix. A matrix of zeros has no sphere: the first step refuses it, on all ranks, when other
matrices may have taken theirs.

Unsettled: Megatron's form has a radius by configuration, and dion's a stored one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dmuon.algorithms.algorithm import Group, Matrices
from dmuon.algorithms.muon import MUON, advance, inputs
from dmuon.algorithms.stages import squared_norms

_EPS = 1e-10


def measure(params: Sequence[Tensor], updates: Sequence[Tensor]) -> Tensor:
    """Squared norms of weights and of updates, and their products."""
    norms = squared_norms(params), squared_norms(updates)
    pairs = zip(params, updates, strict=True)
    products = [(param.to(norms[0].dtype) * update).sum() for param, update in pairs]
    return torch.stack((*norms, torch.stack(products).to(norms[0].dtype)), dim=-1)


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
    """Take the step on the sphere."""
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    squares, update_squares, products = totals.unbind(dim=-1)
    radii, decay = squares.sqrt(), 1 - lr * weight_decay
    steps = lr * radii / update_squares.sqrt().clamp(min=_EPS)
    moved = decay**2 * squares - 2 * decay * steps * products + steps**2 * update_squares
    factors = radii / moved.sqrt()
    torch._foreach_mul_(list(params), list((decay * factors).unbind()))
    torch._foreach_mul_(list(updates), list((steps * factors).unbind()))
    torch._foreach_sub_(list(params), list(updates))


MUONH = replace(
    MUON,
    name="muonh",
    stages=Matrices(advance, inputs, apply, sums=("radius", "update", "product"), measure=measure),
)
