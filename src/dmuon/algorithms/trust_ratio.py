"""Muon with a trust ratio: a step in proportion to the size of its matrix.

With O = NS(U) of Muon, r = |W|_F / |s O|_F between `trust_min` and `trust_max`, and 1 if W or O is
zero:

W <- (1 - lr wd) W - lr r s O

Source: the ratio is that of LARS and LAMB (You et al. 2020, arXiv 1904.00962), on Muon's update.
State: momentum. Both norms take one more collective for each bucket, of two numbers for each
matrix. Bounds are 0 and 10; with equal bounds it is Muon of that learning rate.

Unsettled: no published run of it with Muon was found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dmuon.algorithms.algorithm import Group, Matrices
from dmuon.algorithms.muon import MUON, advance, inputs
from dmuon.algorithms.stages import apply_, squared_norms


def measure(params: Sequence[Tensor], updates: Sequence[Tensor]) -> Tensor:
    """Squared norms of weights and updates."""
    return torch.stack((squared_norms(params), squared_norms(updates)), dim=-1)


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
    """Scale updates by their ratios, and take the step."""
    squares, update_squares = totals.unbind(dim=-1)
    ratios = (squares / update_squares).sqrt() / scale
    ratios = ratios.clamp(group["trust_min"], group["trust_max"])
    ratios = torch.where((squares == 0) | (update_squares == 0), 1, ratios)
    torch._foreach_mul_(list(updates), list(ratios.unbind()))
    apply_(params, updates, scale=scale, lr=lr, weight_decay=weight_decay)


TRUST_RATIO = replace(
    MUON,
    name="trust_ratio",
    stages=Matrices(advance, inputs, apply, sums=("weight", "update"), measure=measure),
    options={**MUON.options, "trust_min": 0.0, "trust_max": 10.0},
    bounds={**MUON.bounds, "trust_min": math.inf, "trust_max": math.inf},
)
