"""What algorithms are made of: elementwise stages on lists of local tensors.

Momentum runs before the exchange; decay and the scaled step after it. All of it is elementwise,
so the result does not depend on how a matrix is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def momentum_(buffers: Sequence[Tensor], grads: Sequence[Tensor], momentum: float) -> None:
    """Advance momentum: `B <- momentum B + (1 - momentum) G`, an exponential moving average.

    This is the convention of `torch.optim.Muon`. The other one in use, `B <- momentum B + G`,
    keeps a buffer that is `1 / (1 - momentum)` times larger.

    Modifies: `buffers`.
    """
    if buffers:
        torch._foreach_lerp_(list(buffers), list(grads), 1 - momentum)


def nesterov(buffers: Sequence[Tensor], grads: Sequence[Tensor], momentum: float) -> list[Tensor]:
    """Look ahead: `(1 - momentum) G + momentum B`, with the momentum already advanced."""
    if not buffers:
        return []
    return list(torch._foreach_lerp(list(grads), list(buffers), momentum))


def second_moment_(moments: Sequence[Tensor], values: Sequence[Tensor], beta2: float) -> None:
    """Advance `V <- beta2 V + (1 - beta2) X o X`, in the dtype of V, not corrected for its start.

    Modifies: `moments`.
    """
    if moments:
        wide = [value.to(moment.dtype) for value, moment in zip(values, moments, strict=True)]
        torch._foreach_mul_(list(moments), beta2)
        torch._foreach_addcmul_(list(moments), wide, wide, 1 - beta2)


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each tensor, one dim, in float32 at least."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(list(torch._foreach_norm(list(tensors), 2, dtype=dtype))).square_()


def fill_(result_BMN: Tensor, wide_BMN: Tensor) -> None:
    """Write matrices, scaled to the norm `sqrt(min(M, N))` of semi-orthogonal ones.

    So every `adjust_lr_fn` means for them what it means for Muon.

    Modifies: `result_BMN`.
    """
    target = math.sqrt(min(wide_BMN.shape[-2:]))
    norm_B11 = torch.linalg.vector_norm(wide_BMN, dim=(-2, -1), keepdim=True)
    result_BMN.copy_(wide_BMN * (target / norm_B11.clamp_(min=1e-10)))


def apply_(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    scale: float,
    lr: float | Tensor,
    weight_decay: float | Tensor,
) -> None:
    """Take the step: `W <- W (1 - lr weight_decay) - lr scale O`, decay with the unscaled lr.

    Modifies: `params`, and `updates` as scratch.
    """
    if not params:
        return
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    torch._foreach_mul_(list(params), 1 - lr * weight_decay)
    if isinstance(lr, Tensor):
        torch._foreach_mul_(list(updates), lr)
        torch._foreach_add_(list(params), list(updates), alpha=-scale)
    else:
        torch._foreach_add_(list(params), list(updates), alpha=-lr * scale)
