"""AdamW for what is not a hidden matrix, through torch's own functional AdamW.

Source: Loshchilov and Hutter 2019 (arXiv 1711.05101).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.adamw import adamw

from dmuon.algorithms.algorithm import Algorithm, Group, StateKind, States


def step_(params: Sequence[Tensor], grads: Sequence[Tensor], states: States, group: Group) -> None:
    """Take one step on local tensors, in place."""
    beta1, beta2 = group["betas"]
    adamw(
        list(params),
        list(grads),
        list(states["exp_avg"]),
        list(states["exp_avg_sq"]),
        [],
        list(states["step"]),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


ADAMW = Algorithm(
    "adamw",
    state={
        "step": StateKind.COUNT,
        "exp_avg": StateKind.ELEMENTS,
        "exp_avg_sq": StateKind.ELEMENTS,
    },
    stages=step_,
    hyperparameters=("lr", "weight_decay", "betas", "eps"),
)
