"""float32 copies of half-precision weights, around a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
