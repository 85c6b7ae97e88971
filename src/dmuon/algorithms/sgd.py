"""SGD with momentum, element by element.

B <- mu B + G;  U = G + mu B (nesterov) or B;  W <- (1 - lr wd) W - lr U

The momentum is that of `torch.optim.SGD`, `mu B + G`, not the average that Muon keeps; the decay is
decoupled, where torch adds it to the gradient. State: momentum. torch's `nesterov` is False.

Source: Sutskever et al. 2013 (proceedings.mlr.press/v28/sutskever13).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon.algorithms.algorithm import Algorithm, Group, StateKind, States
from dmuon.algorithms.stages import apply_


def step_(params: Sequence[Tensor], grads: Sequence[Tensor], states: States, group: Group) -> None:
    """Take one step on local tensors, in place."""
    buffers, updates = list(states["momentum_buffer"]), list(grads)
    torch._foreach_mul_(buffers, group["momentum"])
    torch._foreach_add_(buffers, updates)
    ahead = torch._foreach_mul(buffers, group["momentum"] if group["nesterov"] else 1.0)
    if group["nesterov"]:
        torch._foreach_add_(ahead, updates)
    apply_(params, ahead, scale=1.0, lr=group["lr"], weight_decay=group["weight_decay"])


SGD = Algorithm(
    "sgd",
    state={"momentum_buffer": StateKind.ELEMENTS},
    stages=step_,
    hyperparameters=("lr", "weight_decay", "momentum", "nesterov"),
)
