"""Gradients that their ranks still have to add up."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from dmuon.layout.placements import layout_on

# A gradient, none, on this rank: see `code_of`.
ABSENT, PRESENT = 0, 1
_MOST_AXES = 6


def code_of(fqn: str, param: Tensor) -> int:
    """What other ranks must know of a parameter's gradient, as a number from 0 to 255.

    Zero without one; else odd, with one bit for each mesh axis over which it is `Partial`, and one
    that says whether those are to be averaged.

    Modifies: a gradient that this rank has whole is cut to the parameter's shard.

    Raises:
        ValueError: The gradient cannot be taken; names the parameter.
    """
    grad = param.grad
    if grad is None or not param.requires_grad:
        return ABSENT
    problem = _problem(fqn, grad, param)
    if problem is not None:
        raise ValueError(problem)
    if not isinstance(grad, DTensor) or grad.placements == param.placements:  # type: ignore[attr-defined]
        return PRESENT
    code = PRESENT
    for axis, placement in enumerate(grad.placements):
        if isinstance(placement, Partial):
            code |= 2 << axis | (2 << _MOST_AXES) * (placement.reduce_op == "avg")
    if code == PRESENT:
        reduce_(cast("DTensor", param), code)
    return code


def reduce_(param: DTensor, code: int) -> None:
    """Bring a gradient that is `Partial` on some rank to the parameter's placements.

    A rank without a gradient adds zeros.

    Modifies: `param.grad`.

    Collective: all ranks of the parameter's mesh.
    """
    if not isinstance(param.grad, DTensor):
        param.grad = _zeros(param, code)
    param.grad = param.grad.redistribute(placements=param.placements)


def _zeros(param: DTensor, code: int) -> DTensor:
    """A gradient of zeros with the placements that a code stands for."""
    op = "avg" if code & 2 << _MOST_AXES else "sum"
    placements: list[Placement] = [
        Partial(op) if code & 2 << axis else placement
        for axis, placement in enumerate(param.placements)
    ]
    whole = [Replicate() if isinstance(p, Partial) else p for p in placements]
    layout = layout_on(param.device_mesh, whole, param.shape, "gradient")
    shape = layout.local_shape(torch.distributed.get_rank())
    return DTensor.from_local(
        param.to_local().new_zeros(shape),
        param.device_mesh,
        placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _problem(fqn: str, grad: Tensor, param: Tensor) -> str | None:
    """Say why a gradient cannot be taken, or None.

    Its type, mesh, placements, density and shape must be the parameter's; it may be `Partial`, or
    `Replicate` where the parameter is sharded.
    """
    if grad.layout is not torch.strided:
        return (
            f"{fqn}: the gradient is sparse ({grad.layout}), which neither Muon nor AdamW can "
            "take; use Embedding(sparse=False), or give this parameter to torch.optim.SparseAdam"
        )
    if isinstance(grad, DTensor) != isinstance(param, DTensor):
        kinds = ["a DTensor" if isinstance(t, DTensor) else "a plain tensor" for t in (grad, param)]
        return (
            f"{fqn}: the gradient is {kinds[0]} of shape {tuple(grad.shape)}, but the parameter is "
            f"{kinds[1]}; assign gradients in the parameter's layout (distribute_tensor)"
        )
    if grad.shape != param.shape:
        return (
            f"{fqn}: the gradient has shape {tuple(grad.shape)}, but the parameter "
            f"{tuple(param.shape)}; call zero_grad() when a parameter's data is replaced"
        )
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and not _fits(grad, param):
        return (
            f"{fqn}: the gradient lies on {grad.device_mesh} as {grad.placements}, but the "
            f"parameter on {param.device_mesh} as {param.placements}; redistribute it first"
        )
    return None


def _fits(grad: DTensor, param: DTensor) -> bool:
    if grad.device_mesh != param.device_mesh or len(grad.placements) > _MOST_AXES:
        return False
    pairs = zip(grad.placements, param.placements, strict=True)
    return all(g == p or g.is_partial() or g.is_replicate() for g, p in pairs)
