"""Learning-rate scales: how the step of a matrix depends on its shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

AdjustLr = str | Callable[[tuple[int, int]], float] | None

_SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "spectral": lambda rows, cols: math.sqrt(max(rows, cols)),
    "spectral_unclamped": lambda rows, cols: math.sqrt(rows / cols),
    "deepseek_v4": lambda rows, cols: 0.18 * math.sqrt(max(rows, cols)),
    "none": lambda rows, cols: 1.0,
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
            - "deepseek_v4": `0.18 sqrt(max(rows, cols))`, that of DeepSeek-V4.
            - "none": 1, for algorithms whose step has a size of its own.

            Or a function of `(rows, cols)`. Learning rates are comparable only within a mode.
        shape: Logical shape of the matrix.

    Returns:
        The factor.

    Raises:
        ValueError: Unknown name.
    """
    if callable(adjust_lr_fn):
        return _called(adjust_lr_fn, shape)
    name = "original" if adjust_lr_fn is None else adjust_lr_fn
    if not isinstance(name, str) or name not in _SCALES:
        raise ValueError(
            f"adjust_lr_fn {adjust_lr_fn!r} is unknown; use one of {', '.join(ADJUST_LR_FNS)}, "
            "or a function of the matrix shape (rows, cols)"
        )
    return _SCALES[name](*shape)


def _called(adjust_lr_fn: Callable[[tuple[int, int]], float], shape: tuple[int, int]) -> float:
    try:
        scale = adjust_lr_fn(shape)
    except TypeError as error:
        raise ValueError(
            f"adjust_lr_fn {adjust_lr_fn!r} fails on one argument, a shape (rows, cols): {error}"
        ) from error
    if not isinstance(scale, Real) or not math.isfinite(scale):
        raise ValueError(f"adjust_lr_fn {adjust_lr_fn!r} gives {scale!r} for {shape}, not a number")
    return float(scale)
