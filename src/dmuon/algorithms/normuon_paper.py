"""NorMuon as its paper writes it: an update of a fixed RMS, whose rows have equal size.

With O = NS(U) of Muon, for each row i of the logical matrix:

v_i <- beta2 v_i + (1 - beta2) mean_j O_ij^2;  P_i = O_i / (sqrt(v_i) + eps)
W <- (1 - lr wd) W - lr s P sqrt(min(m, n)) / |P|_F

Source: Li et al. 2025 (arXiv 2510.05491), from a transcription. State: momentum, and v in float32,
which travels with the matrix. The paper's step `0.2 sqrt(mn) P / |P|_F` is that of
`adjust_lr_fn="match_rms_adamw"`; it has `nesterov=False` and beta1 = beta2 = 0.95.

Unsettled: the paper's eps, here 1e-8.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dmuon.algorithms.algorithm import Algorithm, Group, Matrices, StateKind
from dmuon.algorithms.muon import HYPERPARAMETERS, advance, inputs
from dmuon.algorithms.stages import apply_, fill_

_EPS = 1e-8


def finish(result_BMN: Tensor, states: Mapping[str, Tensor], group: Group) -> None:
    """Equalize the rows of whole matrices, and set the norm of each."""
    moment_BM1 = states["second_moment_rows"]
    wide_BMN = result_BMN.to(moment_BM1.dtype)
    moment_BM1.lerp_(wide_BMN.square().mean(dim=-1, keepdim=True), 1 - group["beta2"])
    fill_(result_BMN, wide_BMN / moment_BM1.sqrt().add_(_EPS))


NORMUON_PAPER = Algorithm(
    "normuon_paper",
    state={"momentum_buffer": StateKind.ELEMENTS, "second_moment_rows": StateKind.ROWS},
    stages=Matrices(advance, inputs, apply_, finish),
    options={"beta2": 0.95},
    hyperparameters=HYPERPARAMETERS,
)
