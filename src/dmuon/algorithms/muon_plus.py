"""Muon+: Muon whose update has the same norm at every step.

O = NS(U);  W <- (1 - lr wd) W - lr s O sqrt(min(m, n)) / |O|_F

Source: arXiv 2602.21545, as in github.com/karpathy/nanochat, which prepares the matrix by MuonEq
first: `muoneq_plus`. State: momentum.

Unsettled: in what the paper differs from nanochat; its text was not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dmuon.algorithms.algorithm import Group, Matrices
from dmuon.algorithms.muon import MUON, advance, inputs
from dmuon.algorithms.muoneq import prepare
from dmuon.algorithms.stages import apply_, fill_


def finish(result_BMN: Tensor, _: Mapping[str, Tensor], __: Group) -> None:
    """Set the norm of whole matrices."""
    fill_(result_BMN, result_BMN.to(torch.promote_types(result_BMN.dtype, torch.float32)))


MUON_PLUS = replace(MUON, name="muon_plus", stages=Matrices(advance, inputs, apply_, finish))
MUONEQ_PLUS = replace(
    MUON, name="muoneq_plus", stages=Matrices(advance, inputs, apply_, finish, prepare)
)
