"""From tensors to layouts: the only reader of meshes and placements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from dmuon.layout.layout import Layout, Sharding, single_rank


def read_layout(fqn: str, tensor: Tensor, process_group: dist.ProcessGroup | None = None) -> Layout:
    """Read the layout of a parameter or of its state.

    Args:
        fqn: Name used in errors.
        tensor: A DTensor on any mesh, or a plain tensor.
        process_group: Ranks over which a *plain* tensor is replicated (DDP). Without it a plain
            tensor belongs to this rank alone.

    Returns:
        Its layout in global terms.

    Raises:
        ValueError: A placement is neither shard-like nor `Replicate`, or the local tensor does
            not have the shape that the placements imply.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        ranks = ranks_of(tensor, process_group)
        return (
            Layout(shape, (len(ranks),), ranks, (None,))
            if process_group
            else single_rank(shape, *ranks)
        )
    mesh = tensor.device_mesh
    layout = layout_on(mesh, tensor.placements, shape, fqn)
    rank, found = dist.get_rank(), tuple(tensor.to_local().shape)
    expected = layout.local_shape(rank) if rank in layout.ranks else found
    # Without elements nothing can be wrong, and FSDP2 does not cut such a tensor as others.
    if expected != found and tensor.numel():
        raise ValueError(
            f"{fqn}: placements {tensor.placements} on a mesh of shape {tuple(mesh.shape)} imply "
            f"a local shape of {expected}, but the local tensor has {found}. Shard it with "
            "distribute_tensor, fully_shard or parallelize_module"
        )
    return layout


def ranks_of(tensor: Tensor, process_group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Ranks that may store a part of a tensor, as `read_layout` takes it; never fails."""
    if isinstance(tensor, DTensor):
        return tuple(tensor.device_mesh.mesh.flatten().tolist())
    if process_group is not None:
        return tuple(dist.get_process_group_ranks(process_group))
    return (dist.get_rank() if dist.is_initialized() else 0,)


def layout_on(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], fqn: str
) -> Layout:
    """The layout of a tensor of a global shape on a mesh.

    Raises:
        ValueError: A placement is neither shard-like nor `Replicate`; names `fqn`.
    """
    axes = tuple(_read_placement(fqn, p, axis, len(shape)) for axis, p in enumerate(placements))
    return Layout(tuple(shape), tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), axes)


def _read_placement(fqn: str, placement: Placement, axis: int, ndim: int) -> Sharding | None:
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if dim is None or placement.is_partial():
        raise ValueError(
            f"{fqn}: placement {placement!r} on mesh axis {axis} cannot be optimized; parameters "
            "must be Shard or Replicate on every axis (redistribute it first)"
        )
    return Sharding(dim % ndim, int(getattr(placement, "split_factor", 1)))


def wire_device(tensor: Tensor) -> torch.device:
    """Device on which a parameter's matrices travel and are orthogonalized.

    The mesh's device for a DTensor, also when its shards are offloaded to the CPU; the tensor's
    own device otherwise.
    """
    if not isinstance(tensor, DTensor):
        return tensor.device
    kind = tensor.device_mesh.device_type
    local = tensor.to_local().device
    if kind == local.type:
        return local
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())
