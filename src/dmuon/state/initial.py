"""Optimizer state of one parameter: made from construction on, in the parameter's own layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dmuon.algorithms import ALGORITHMS, StateKind
from dmuon.layout.placements import layout_on
from dmuon.options import Settings

HALF = (torch.bfloat16, torch.float16)
# State that is made only where it is asked for; any algorithm can have it.
MASTER = "master_weight"


def new_state(param: Tensor, group: Mapping[str, Any], settings: Settings) -> dict[str, Tensor]:
    """Make the state of a parameter that has taken no step.

    Args:
        param: The parameter.
        group: Its group, which names the algorithm and says where its matrices lie.
        settings: Whether a bfloat16 or float16 parameter has a float32 `master_weight`, the other
            state being float32 too; whether momentum of a replicated parameter is sharded.
    """
    algorithm = ALGORITHMS[group["algorithm"]]
    master = {}
    if settings.master_weights and param.dtype in HALF:
        param = param.detach().to(torch.float32)
        master = {MASTER: param}
    updates = elements = torch.zeros_like(param, memory_format=torch.preserve_format)
    if algorithm.matrices and settings.shard_state and not isinstance(param, DTensor):
        assert settings.process_group is not None
        mesh = DeviceMesh.from_group(settings.process_group, param.device.type)
        elements = _zeros(param.shape, mesh, [Shard(0)], dtype=param.dtype, device=param.device)
    make: dict[StateKind, Callable[[torch.dtype], Tensor]] = {
        StateKind.ELEMENTS: lambda dtype: torch.zeros_like(elements, dtype=dtype),
        StateKind.UPDATES: lambda dtype: torch.zeros_like(updates, dtype=dtype),
        StateKind.ROWS: lambda dtype: _zero_rows(elements, group, dtype),
        StateKind.COLS: lambda dtype: _zero_cols(elements, group, dtype),
        StateKind.COUNT: lambda _: torch.zeros((), dtype=torch.float32, device="cpu"),
    }
    state = {
        key: make[kind](algorithm.dtype_of(key, param.dtype))
        for key, kind in algorithm.state.items()
    }
    return {**state, **master}


def _zero_rows(elements: Tensor, group: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """One value per row of each matrix of a parameter, (*batch, rows, blocks side by side)."""
    row_dim = 0 if group["flatten"] else elements.ndim - 2
    return _zero_lines(elements, elements.shape[: row_dim + 1], group, 1, dtype)


def _zero_cols(elements: Tensor, group: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """One value per column of each matrix, (*batch, columns, blocks side by side).

    Only whole matrices are apart: what FSDP or tensor parallelism cut has its columns on each rank.
    """
    row_dim = 0 if group["flatten"] else elements.ndim - 2
    cols = math.prod(elements.shape[row_dim + 1 :])
    return _zero_lines(elements, (*elements.shape[:row_dim], cols), group, 0, dtype)


def _zero_lines(
    elements: Tensor,
    lines: Sequence[int],
    group: Mapping[str, Any],
    split_dim: int,
    dtype: torch.dtype,
) -> Tensor:
    """Zeros for the lines of each matrix, which a split along `split_dim` has side by side."""
    sizes, dim = group["split"] or ((), 0)
    shape = torch.Size((*lines, len(sizes) if dim == split_dim and sizes else 1))
    num_kept = len(lines) - (split_dim == 0)
    if not isinstance(elements, DTensor):
        return torch.zeros(shape, dtype=dtype, device=elements.device)
    placements: list[Placement] = [
        placement if getattr(placement, "dim", elements.ndim) < num_kept else Replicate()
        for placement in elements.placements
    ]
    device = elements.to_local().device
    return _zeros(shape, elements.device_mesh, placements, dtype=dtype, device=device)


def _zeros(
    shape: torch.Size,
    mesh: DeviceMesh,
    placements: list[Placement],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> DTensor:
    """A DTensor of zeros, also where torch's own factory does not know the placements."""
    layout, rank = layout_on(mesh, placements, shape, "state"), dist.get_rank()
    local_shape = layout.local_shape(rank) if rank in layout.ranks else (0,)
    return DTensor.from_local(
        torch.zeros(local_shape, dtype=dtype, device=device),
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
