"""Signum: the sign of momentum, element by element.

B <- mu B + (1 - mu) G;  U = (1 - mu) G + mu B (nesterov) or B;  W <- (1 - lr wd) W - lr sign(U)

Source: Bernstein et al. 2018 (arXiv 1802.04434), which has `nesterov=False` and no decay.
State: momentum. The sign of 0 is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon.algorithms.algorithm import Algorithm, Group, StateKind, States
from dmuon.algorithms.muon import advance, inputs
from dmuon.algorithms.stages import apply_


def step_(params: Sequence[Tensor], grads: Sequence[Tensor], states: States, group: Group) -> None:
    """Take one step on local tensors, in place."""
    advance(grads, states, group)
    updates = torch._foreach_sign(list(inputs(grads, states, group)))
    apply_(params, updates, scale=1.0, lr=group["lr"], weight_decay=group["weight_decay"])


SIGNUM = Algorithm(
    "signum",
    state={"momentum_buffer": StateKind.ELEMENTS},
    stages=step_,
    hyperparameters=("lr", "weight_decay", "momentum", "nesterov"),
)
