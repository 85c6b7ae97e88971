"""The other half: AdamW for what is not a hidden matrix, through torch's own functional AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


def new_state(param: Tensor) -> dict[str, Tensor]:
    """State of one parameter: `step`, `exp_avg` and `exp_avg_sq`, in the parameter's layout."""
    return {
        "step": torch.tensor(0.0, dtype=torch.float32),
        "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
    }


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    group: Mapping[str, Any],
) -> None:
    """One AdamW step (Loshchilov and Hutter 2019, arXiv 1711.05101) on local tensors.

    Modifies: `params` and `states`.
    """
    beta1, beta2 = group["betas"]
    adamw(
        list(params),
        [g.to(state["exp_avg"].dtype) for g, state in zip(grads, states, strict=True)],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
