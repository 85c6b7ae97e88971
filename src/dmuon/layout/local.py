"""What this rank stores of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.layout.layout import Layout


def local(tensor: Tensor) -> Tensor:
    """What this rank stores of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def has_grad(param: Tensor) -> bool:
    """Whether this rank has a gradient for a parameter; a frozen parameter has none."""
    return param.requires_grad and param.grad is not None


def local_grad(param: Tensor) -> Tensor:
    """This rank's gradient of a parameter, in its layout; zeros if only other ranks have one."""
    grad = param.grad if param.requires_grad else None
    return torch.zeros_like(local(param)) if grad is None else local(grad)


def local_part(tensor: Tensor, layout: Layout, rank: int) -> Tensor:
    """View of a whole tensor that covers what `rank` stores under `layout`.

    Raises:
        ValueError: The shard is not one contiguous range per dim.
    """
    index = []
    for runs in layout.local_runs(rank):
        if len(runs) > 1:
            raise ValueError(f"{layout} has a strided shard, which is not a view")
        index.append(slice(*runs[0]) if runs else slice(0, 0))
    return tensor[tuple(index)]
