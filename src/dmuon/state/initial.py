"""Optimizer state of one parameter: made from construction on, in the parameter's own layout."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, zeros

from dmuon.algorithms import adamw


def new_state(
    param: Tensor,
    *,
    use_muon: bool,
    master_weights: bool,
    shard_over: dist.ProcessGroup | None,
) -> dict[str, Tensor]:
    """Make the state of a parameter that has taken no step.

    Args:
        param: The parameter.
        use_muon: `momentum_buffer`; else `step`, `exp_avg` and `exp_avg_sq`.
        master_weights: Keep a float32 `master_weight` if the parameter is bfloat16 or float16; the
            other state is then float32 too.
        shard_over: Ranks over which the momentum of a plain, replicated parameter is sharded.
    """
    master = {}
    if master_weights and param.dtype in (torch.bfloat16, torch.float16):
        param = param.detach().to(torch.float32)
        master = {"master_weight": param}
    if not use_muon:
        return {**adamw.new_state(param), **master}
    if shard_over is None or isinstance(param, DTensor):
        momentum = torch.zeros_like(param, memory_format=torch.preserve_format)
    else:
        mesh = DeviceMesh.from_group(shard_over, param.device.type)
        momentum = cast(
            "Tensor",
            zeros(param.shape, dtype=param.dtype, device_mesh=mesh, placements=[Shard(0)]),
        )
    return {"momentum_buffer": momentum, **master}
