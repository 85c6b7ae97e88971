"""MuonEq: Muon of a momentum whose rows are scaled to equal size first.

X_i = U_i (|U|_F / sqrt(m)) / max(|U_i|, 1e-6) for each row i of the logical m x n matrix;
W <- (1 - lr wd) W - lr s NS(X)

Source: arXiv 2603.28254, in the row form (MuonEq-R) of github.com/karpathy/nanochat. Runs at the
owner, which has whole rows. State: momentum.

Unsettled: the paper has a form for columns too, which nobody was found to use. The bound 1e-6 is
absolute: rows below it stay smaller than the others.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from dmuon.algorithms.algorithm import Group, Matrices
from dmuon.algorithms.muon import MUON, advance, inputs
from dmuon.algorithms.stages import apply_

_EPS = 1e-6


def prepare(matrices_BMN: Tensor, _: Group) -> Tensor:
    """Matrices with rows of equal size."""
    wide_BMN = matrices_BMN.to(torch.promote_types(matrices_BMN.dtype, torch.float32))
    rows_BM1 = torch.linalg.vector_norm(wide_BMN, dim=-1, keepdim=True)
    norm_B11 = torch.linalg.vector_norm(rows_BM1, dim=-2, keepdim=True)
    sizes_BM1: Tensor = norm_B11 / math.sqrt(rows_BM1.shape[-2]) / rows_BM1.clamp(min=_EPS)
    return wide_BMN * sizes_BM1


MUONEQ = replace(MUON, name="muoneq", stages=Matrices(advance, inputs, apply_, prepare=prepare))
