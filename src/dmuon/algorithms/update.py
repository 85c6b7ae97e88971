"""The arithmetic of Muon around orthogonalization: pure functions on lists of tensors.

Momentum runs on pieces, before the exchange; decay and the scaled step on pieces, after it. All
of it is elementwise, so the result does not depend on how a matrix is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

AdjustLr = str | Callable[[tuple[int, int]], float] | None

_SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "spectral": lambda rows, cols: math.sqrt(max(rows, cols)),
    "spectral_unclamped": lambda rows, cols: math.sqrt(rows / cols),
}
ADJUST_LR_FNS = tuple(_SCALES)


def lr_scale(adjust_lr_fn: AdjustLr, shape: tuple[int, int]) -> float:
    """Factor by which the learning rate of one matrix is multiplied.

    Args:
        adjust_lr_fn: None or a name, with (rows, cols) = (fan_out, fan_in) of the *logical*
            matrix, never of a shard:

            - None, "original": `sqrt(max(1, rows / cols))` (Jordan 2024,
              kellerjordan.github.io/posts/muon; `torch.optim.Muon`).
            - "match_rms_adamw": `0.2 sqrt(max(rows, cols))`, an update RMS of about 0.2 as
              AdamW's, so AdamW's learning rate carries over (Liu et al. 2025, arXiv 2502.16982).
            - "spectral": `sqrt(max(rows, cols))` (Megatron's Emerging-Optimizers).
            - "spectral_unclamped": `sqrt(rows / cols)` (`torch.optim.Muon` >= 2.14).

            Or a function of `(rows, cols)`. Learning rates are comparable only within a mode.
        shape: Logical shape of the matrix.

    Returns:
        The factor.

    Raises:
        ValueError: Unknown name.
    """
    if callable(adjust_lr_fn):
        return float(adjust_lr_fn(shape))
    name = "original" if adjust_lr_fn is None else adjust_lr_fn
    if not isinstance(name, str) or name not in _SCALES:
        raise ValueError(
            f"adjust_lr_fn {adjust_lr_fn!r} is unknown; use one of {', '.join(ADJUST_LR_FNS)}, "
            "or a function of the matrix shape (rows, cols)"
        )
    return _SCALES[name](*shape)


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


def refresh_(masters: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Take into master weights what was changed in their parameters since `store_`.

    Modifies: `masters`.
    """
    for master, param in zip(masters, params, strict=True):
        master.copy_(torch.where(master.to(param.dtype) == param, master, param))


def store_(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Round master weights to their parameters.

    Modifies: `params`.
    """
    if params:
        torch._foreach_copy_(list(params), list(masters))


def apply_(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    scales: Sequence[float],
    *,
    lr: float | Tensor,
    weight_decay: float,
) -> None:
    """Take the step: `W <- W (1 - lr weight_decay) - lr scale O`, decay with the unscaled lr.

    Modifies: `params`, and `updates` as scratch.
    """
    if not params:
        return
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    weights, steps = list(params), list(updates)
    torch._foreach_mul_(weights, 1 - lr * weight_decay)
    if isinstance(lr, Tensor):
        torch._foreach_mul_(steps, list(scales))
        torch._foreach_mul_(steps, lr)
    else:
        torch._foreach_mul_(steps, [lr * scale for scale in scales])
    torch._foreach_sub_(weights, steps)
