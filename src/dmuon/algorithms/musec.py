"""Musec and Soft Musec: momentum whose singular values are cut off at D, and that is the step.

H = G at the first step, then mu M + (1 - mu) G;  M = clip(H);  W <- (1 - lr wd) W - lr s M

Musec: clip takes each singular value x to min(x, D), by an SVD in float32 at least. Soft Musec:
to D x / sqrt(x^2 + D^2), by K coupled Newton-Schulz steps for the inverse root of H H^T + D^2 I.

Source: arXiv 2609.11655, algorithms 2 to 4; its b is 1 - mu. Options: `max_singular` D, 0.5 (tried
from 0.05 to 1), and `soft_steps` K, 5. It has `adjust_lr_fn="none"`; `nesterov` and the
coefficients are not read. State: momentum M, as the pieces of the result arrive, and the number of
the step. With `shard_state` every replica keeps all of M, since all of M is the update.

The size of the step follows that of the gradients, unlike Muon's. On an accelerator M travels, and
so is rounded, in `ns_dtype`.

Unsettled: the paper's b; it says that theory wants b <= 1/8. K = 5 does not do for singular values
far above D: the result is then smaller than D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dmuon.algorithms.algorithm import Algorithm, Group, Matrices, StateKind, States
from dmuon.algorithms.stages import apply_, momentum_


def advance(grads: Sequence[Tensor], states: States, group: Group) -> None:
    """Average the gradients into the clipped momentum; the first is taken as it is."""
    pairs = list(zip(states["momentum_buffer"], grads, states["step"], strict=True))
    later = [(buffer, grad) for buffer, grad, number in pairs if number > 1]
    momentum_([buffer for buffer, _ in later], [grad for _, grad in later], group["momentum"])
    for buffer, grad, number in pairs:
        if number == 1:
            buffer.copy_(grad)


def inputs(_: Sequence[Tensor], states: States, __: Group) -> Sequence[Tensor]:
    """The momentum."""
    return states["momentum_buffer"]


def clip(stack_BMN: Tensor, group: Group, _: torch.dtype) -> Tensor:
    """Singular values cut off at D."""
    wide_BMN = stack_BMN.to(torch.promote_types(stack_BMN.dtype, torch.float32))
    left_BMM, values_BM, right_BMN = torch.linalg.svd(wide_BMN, full_matrices=False)
    values_BM.clamp_(max=group["max_singular"])
    return torch.bmm(left_BMM * values_BM[:, None], right_BMN).to(stack_BMN.dtype)


def soft_clip(stack_BMN: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """Singular values saturated towards D."""
    limit, wide_BMN = group["max_singular"], stack_BMN.to(dtype)
    identity_MM = torch.eye(stack_BMN.shape[1], dtype=dtype, device=stack_BMN.device)
    gram_BMM = torch.bmm(wide_BMN, wide_BMN.mT) + limit**2 * identity_MM
    norm_B11 = torch.linalg.vector_norm(gram_BMM, dim=(-2, -1), keepdim=True)
    root_BMM, inverse_BMM = gram_BMM / norm_B11, identity_MM.expand_as(gram_BMM)
    for _ in range(int(group["soft_steps"])):
        factor_BMM = 1.5 * identity_MM - 0.5 * torch.bmm(inverse_BMM, root_BMM)
        root_BMM = torch.bmm(root_BMM, factor_BMM)
        inverse_BMM = torch.bmm(factor_BMM, inverse_BMM)
    return torch.bmm(inverse_BMM / norm_B11.sqrt(), wide_BMN).mul_(limit).to(stack_BMN.dtype)


def after(updates: Sequence[Tensor], states: States, _: Group) -> Sequence[Tensor]:
    """The result is the momentum of the next step."""
    torch._foreach_copy_(list(states["momentum_buffer"]), list(updates))
    return updates


MUSEC = Algorithm(
    "musec",
    state={"momentum_buffer": StateKind.UPDATES, "step": StateKind.COUNT},
    stages=Matrices(advance, inputs, apply_, spectral=clip, after=after),
    options={"max_singular": 0.5},
    bounds={"max_singular": math.inf, "soft_steps": 100},
    hyperparameters=("lr", "weight_decay", "momentum", "ns_dtype", "adjust_lr_fn"),
)
SOFT_MUSEC = replace(
    MUSEC,
    name="soft_musec",
    stages=Matrices(advance, inputs, apply_, spectral=soft_clip, after=after),
    options={"max_singular": 0.5, "soft_steps": 5},
)
