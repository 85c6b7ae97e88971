"""NorMuon whose second moment lies along the longer side of each matrix.

With O = NS(U) of Muon; v_i is the moment of row i where rows >= cols, else that of column j:

v_i <- beta2 v_i + (1 - beta2) mean_j O_ij^2;  P_ij = O_ij / sqrt(max(v_i, eps))
W <- (1 - lr wd) W - lr s P |O|_F / |P|_F

Source: the authors' own record in github.com/KellerJordan/modded-nanogpt (pull request 141), as
kept by nanochat and Emerging-Optimizers; eps 1e-10. Of a wide matrix the rows are equal after
Newton-Schulz anyway, so the columns are what there is to equalize. State: momentum, and one moment
for each row and each column in float32, of which a matrix uses one.

Unsettled: Emerging-Optimizers' comment says the other axis; this is what its code does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dmuon.algorithms.algorithm import Algorithm, Group, Matrices, StateKind
from dmuon.algorithms.muon import HYPERPARAMETERS, advance, inputs
from dmuon.algorithms.stages import apply_

_EPS = 1e-10


def finish(result_BMN: Tensor, states: Mapping[str, Tensor], group: Group) -> None:
    """Equalize the lines along the longer side of whole matrices, and keep the norm of each."""
    along_rows = result_BMN.shape[-2] >= result_BMN.shape[-1]
    key = "second_moment_rows" if along_rows else "second_moment_cols"
    moment_B = states[key] if along_rows else states[key].mT
    wide_BMN = result_BMN.to(moment_B.dtype)
    norm_B11 = torch.linalg.vector_norm(wide_BMN, dim=(-2, -1), keepdim=True)
    mean_B = wide_BMN.square().mean(dim=-1 if along_rows else -2, keepdim=True)
    moment_B.lerp_(mean_B, 1 - group["beta2"])
    wide_BMN = wide_BMN * moment_B.clamp(min=_EPS).rsqrt_()
    rescaled_B11 = torch.linalg.vector_norm(wide_BMN, dim=(-2, -1), keepdim=True).clamp_(min=_EPS)
    result_BMN.copy_(wide_BMN.mul_(norm_B11 / rescaled_B11))


NORMUON_LONG_AXIS = Algorithm(
    "normuon_long_axis",
    state={
        "momentum_buffer": StateKind.ELEMENTS,
        "second_moment_rows": StateKind.ROWS,
        "second_moment_cols": StateKind.COLS,
    },
    stages=Matrices(advance, inputs, apply_, finish),
    options={"beta2": 0.95},
    hyperparameters=HYPERPARAMETERS,
)
