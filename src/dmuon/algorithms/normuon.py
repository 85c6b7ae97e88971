"""NorMuon: Muon whose update has rows of equal size, in its three published forms.

With O = NS(U) of Muon, for each row i of the logical matrix:

v_i <- beta2 v_i + (1 - beta2) mean_j O_ij^2;  P_i = O_i / (sqrt(v_i) + eps)
W <- (1 - lr wd) W - lr s P |O|_F / (|P|_F + eps)

Source: Li et al. 2025 (arXiv 2510.05491). v is in float32, is not corrected for its start at 0, and
travels with the matrix; beta2 is 0.95.

- `normuon`: the *official* form of github.com/zichongli5/NorMuon, as above: always per row, with
  Nesterov, eps 1e-10 outside of the root. The authors use lr 0.02 and no decay.
- `normuon_paper`: the paper's, from a transcription: eps 1e-8, and sqrt(min(m, n)) for |O|_F. Its
  step `0.2 sqrt(mn) P / |P|_F` is then that of `adjust_lr_fn="match_rms_adamw"`; it has
  `nesterov=False`.
- `normuon_long_axis`: the authors' own record in github.com/KellerJordan/modded-nanogpt (pull
  request 141), as kept by nanochat and Emerging-Optimizers: v of the rows where m >= n, else of the
  columns; P = O / sqrt(max(v, eps)), eps 1e-10. Both v are kept; a matrix uses one of them.

Unsettled: for a wide matrix an exact polar factor has rows of equal size already, so there the
first two forms act on the error of Newton-Schulz alone. The paper's eps was not seen.
Emerging-Optimizers' comment says the other axis than its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dmuon.algorithms.algorithm import Group, Matrices, StateKind
from dmuon.algorithms.muon import MUON, advance, inputs
from dmuon.algorithms.stages import apply_, fill_

_EPS = 1e-10
_PAPER_EPS = 1e-8


def finish(result_BMN: Tensor, states: Mapping[str, Tensor], group: Group) -> None:
    """Equalize the rows of whole matrices, and keep the norm of each."""
    wide_BMN, moment_BM1 = _advanced(result_BMN, states["second_moment_rows"], group, dim=-1)
    _keep_norm_(result_BMN, wide_BMN / moment_BM1.sqrt().add_(_EPS))


def finish_paper(result_BMN: Tensor, states: Mapping[str, Tensor], group: Group) -> None:
    """Equalize the rows of whole matrices, and set the norm of each."""
    wide_BMN, moment_BM1 = _advanced(result_BMN, states["second_moment_rows"], group, dim=-1)
    fill_(result_BMN, wide_BMN / moment_BM1.sqrt().add_(_PAPER_EPS))


def finish_long_axis(result_BMN: Tensor, states: Mapping[str, Tensor], group: Group) -> None:
    """Equalize the lines along the longer side of whole matrices, and keep the norm of each."""
    along_rows = result_BMN.shape[-2] >= result_BMN.shape[-1]
    moment = states["second_moment_rows"] if along_rows else states["second_moment_cols"].mT
    wide_BMN, moment = _advanced(result_BMN, moment, group, dim=-1 if along_rows else -2)
    _keep_norm_(result_BMN, wide_BMN * moment.clamp(min=_EPS).rsqrt_())


def _advanced(
    result_BMN: Tensor, moment: Tensor, group: Group, *, dim: int
) -> tuple[Tensor, Tensor]:
    """Matrices, at least in the dtype of their moment, and the moment, advanced in place."""
    wide_BMN = result_BMN.to(torch.promote_types(result_BMN.dtype, moment.dtype))
    mean = wide_BMN.square().mean(dim=dim, keepdim=True)
    moment.lerp_(mean.to(moment.dtype), 1 - group["beta2"])
    return wide_BMN, moment


def _keep_norm_(result_BMN: Tensor, equal_BMN: Tensor) -> None:
    """Write equalized matrices at the norm that the others have."""
    norm_B11, equal_B11 = (
        torch.linalg.vector_norm(each.to(equal_BMN.dtype), dim=(-2, -1), keepdim=True)
        for each in (result_BMN, equal_BMN)
    )
    result_BMN.copy_(equal_BMN * (norm_B11 / equal_B11.add_(_EPS)))


NORMUON = replace(
    MUON,
    name="normuon",
    state={**MUON.state, "second_moment_rows": StateKind.ROWS},
    stages=Matrices(advance, inputs, apply_, finish),
    options={**MUON.options, "beta2": 0.95},
)
NORMUON_PAPER = replace(
    NORMUON, name="normuon_paper", stages=Matrices(advance, inputs, apply_, finish_paper)
)
NORMUON_LONG_AXIS = replace(
    NORMUON,
    name="normuon_long_axis",
    state={**NORMUON.state, "second_moment_cols": StateKind.COLS},
    stages=Matrices(advance, inputs, apply_, finish_long_axis),
)
