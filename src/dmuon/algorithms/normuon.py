"""NorMuon: Muon whose update has rows of equal size.

With O = NS(U) of Muon, for each row i of the logical matrix:

v_i <- beta2 v_i + (1 - beta2) mean_j O_ij^2;  P_i = O_i / (sqrt(v_i) + eps)
W <- (1 - lr wd) W - lr s P |O|_F / (|P|_F + eps)

Source: Li et al. 2025 (arXiv 2510.05491) in the *official* form of github.com/zichongli5/NorMuon:
always per row, with Nesterov, rescaled to the norm of O, v not corrected for its start at 0, eps
1e-10 outside of the root. See `normuon_paper` and `normuon_long_axis` for the other forms.
The authors use lr 0.02 and no decay.

Unsettled: for a wide matrix an exact polar factor has rows of equal size already, so there the
rule acts on the error of Newton-Schulz alone.
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
    """Equalize the rows of whole matrices, and keep the norm of each."""
    moment_BM1 = states["second_moment_rows"]
    wide_BMN = result_BMN.to(moment_BM1.dtype)
    norm_B11 = torch.linalg.vector_norm(wide_BMN, dim=(-2, -1), keepdim=True)
    moment_BM1.lerp_(wide_BMN.square().mean(dim=-1, keepdim=True), 1 - group["beta2"])
    wide_BMN = wide_BMN / moment_BM1.sqrt().add_(_EPS)
    rescaled_B11 = torch.linalg.vector_norm(wide_BMN, dim=(-2, -1), keepdim=True).add_(_EPS)
    result_BMN.copy_(wide_BMN.mul_(norm_B11 / rescaled_B11))


NORMUON = Algorithm(
    "normuon",
    state={"momentum_buffer": StateKind.ELEMENTS, "second_moment_rows": StateKind.ROWS},
    stages=Matrices(advance, inputs, apply_, finish),
    options={"beta2": 0.95},
    hyperparameters=HYPERPARAMETERS,
)
