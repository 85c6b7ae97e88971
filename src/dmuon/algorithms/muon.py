"""Muon: momentum, orthogonalized.

B <- mu B + (1 - mu) G;  U = (1 - mu) G + mu B (nesterov) or B;  W <- (1 - lr wd) W - lr s NS(U)

Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon), in the convention of
`torch.optim.Muon`. State: momentum.

Turbo-Muon (Boissin et al. 2025, arXiv 2512.04632) is a group with `aol=True`,
`ns_coefficients="turbo"` and `ns_steps=4`: rows are scaled by AOL before Newton-Schulz, which saves
a step and orthogonalizes another matrix, the scaled one. All that is made of Muon has that option.

DeepSeek-V4's Muon has `momentum=0.95`, `ns_coefficients="deepseek_v4"`, `ns_steps=10` and
`adjust_lr_fn="deepseek_v4"`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dmuon.algorithms.algorithm import Algorithm, Group, Matrices, StateKind, States
from dmuon.algorithms.stages import apply_, momentum_, nesterov

HYPERPARAMETERS = (
    *("lr", "weight_decay", "momentum", "nesterov", "eps"),
    *("ns_coefficients", "ns_steps", "ns_dtype", "adjust_lr_fn"),
)


def advance(grads: Sequence[Tensor], states: States, group: Group) -> None:
    """Average the gradients into `momentum_buffer`."""
    momentum_(states["momentum_buffer"], grads, group["momentum"])


def inputs(grads: Sequence[Tensor], states: States, group: Group) -> Sequence[Tensor]:
    """The momentum, or the look ahead along the gradient."""
    buffers = states["momentum_buffer"]
    return nesterov(buffers, grads, group["momentum"]) if group["nesterov"] else buffers


MUON = Algorithm(
    "muon",
    state={"momentum_buffer": StateKind.ELEMENTS},
    stages=Matrices(advance, inputs, apply_),
    options={"aol": False},
    bounds={"aol": 2},
    hyperparameters=HYPERPARAMETERS,
)
