"""Who stores which piece: the only reader of meshes and placements.

The arithmetic is pure: a `Layout` is (global shape, mesh shape, ranks, placements), and every
question is answered from it alone, so each rank knows what every other rank stores without
asking. It follows `torch.distributed.tensor`: placements apply from left to right, `Shard` cuts
like `torch.chunk` (the last shards may be smaller or empty), and `_StridedShard` (FSDP2 over
tensor parallelism) cuts each of `split_factor` chunks and joins the results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.layout.matrices import Block, Piece, Range, Runs, runs_size


@dataclass(frozen=True, slots=True)
class Sharding:
    """A mesh axis that cuts tensor dim `dim`; `split_factor` > 1 is torch's `_StridedShard`."""

    dim: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """How one tensor lies on a mesh of ranks.

    Attributes:
        shape: Global shape.
        mesh_shape: Sizes of the mesh axes.
        ranks: Global ranks of the mesh, row-major.
        placements: Per mesh axis a `Sharding`, or None where the axis replicates.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Sharding | None, ...]
    _position: dict[int, int] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Looked up once per rank of large meshes, so neither may take time linear in the ranks.
        key = (self.shape, self.mesh_shape, self.ranks, self.placements)
        object.__setattr__(self, "_position", {rank: i for i, rank in enumerate(self.ranks)})
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of a global rank on the mesh."""
        position = self._position[rank]
        strides = [math.prod(self.mesh_shape[i + 1 :]) for i in range(len(self.mesh_shape))]
        return tuple(position // s % n for s, n in zip(strides, self.mesh_shape, strict=True))

    def replica(self, rank: int) -> int:
        """Which copy of the whole tensor a rank's shard belongs to; 0 without replication."""
        index = 0
        for position, size, placement in zip(
            self.coordinate(rank), self.mesh_shape, self.placements, strict=True
        ):
            if placement is None:
                index = index * size + position
        return index

    def copies(self, rank: int) -> tuple[int, ...]:
        """Ranks that store the same shard as `rank`, itself included; one per replica."""
        mine = self._shard_coordinate(rank)
        same = [other for other in self.ranks if self._shard_coordinate(other) == mine]
        return tuple(sorted(same, key=self.replica))

    def _shard_coordinate(self, rank: int) -> tuple[int, ...]:
        axes = zip(self.coordinate(rank), self.placements, strict=True)
        return tuple(position for position, placement in axes if placement is not None)

    @property
    def num_replicas(self) -> int:
        """How many ranks store each element."""
        sizes = zip(self.mesh_shape, self.placements, strict=True)
        return math.prod(size for size, placement in sizes if placement is None)

    def local_runs(self, rank: int) -> tuple[Runs, ...]:
        """Per dim, the global indices that `rank` stores, in storage order."""
        return _local_runs(self.shape, self.mesh_shape, self.placements, self.coordinate(rank))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of `rank`."""
        return tuple(runs_size(runs) for runs in self.local_runs(rank))

    def pieces(self, block: Block) -> Mapping[int, Piece]:
        """Every rank that stores part of a matrix, with the piece it stores; in rank order."""
        return _pieces(self, block)

    def __str__(self) -> str:
        axes = zip(self.mesh_shape, self.placements, strict=True)
        names = [
            "Replicate" if p is None else f"Shard({p.dim})" + "s" * (p.split_factor > 1)
            for _, p in axes
        ]
        return f"{'x'.join(map(str, self.mesh_shape))} ({', '.join(names)})"


def single_rank(shape: tuple[int, ...], rank: int) -> Layout:
    """Layout of a tensor that lies whole on one rank."""
    return Layout(shape, (1,), (rank,), (None,))


def chunk_range(size: int, num_chunks: int, index: int) -> Range:
    """Half-open range of chunk `index` when `torch.chunk` cuts `size` into `num_chunks`."""
    length = -(-size // num_chunks)
    return min(index * length, size), min((index + 1) * length, size)


def take_runs(runs: Runs, start: int, stop: int) -> Runs:
    """Select positions `start:stop` of the indices listed by `runs`."""
    taken: list[Range] = []
    position = 0
    for run_start, run_stop in runs:
        first = run_start + max(start - position, 0)
        last = min(run_stop, run_start + stop - position)
        position += run_stop - run_start
        if first < last:
            taken.append((first, last))
    return tuple(taken)


def merge_runs(runs: Runs) -> Runs:
    """Join runs that touch."""
    merged: list[Range] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _shard_runs(runs: Runs, sharding: Sharding, num_chunks: int, index: int) -> Runs:
    size = runs_size(runs)
    kept: list[Range] = []
    for part in range(sharding.split_factor):
        start, stop = chunk_range(size, sharding.split_factor, part)
        first, last = chunk_range(stop - start, num_chunks, index)
        kept.extend(take_runs(runs, start + first, start + last))
    return merge_runs(tuple(kept))


@functools.lru_cache(maxsize=65536)
def _local_runs(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Sharding | None, ...],
    coordinate: tuple[int, ...],
) -> tuple[Runs, ...]:
    runs: list[Runs] = [((0, size),) if size else () for size in shape]
    for axis_size, placement, position in zip(mesh_shape, placements, coordinate, strict=True):
        if placement is not None:
            runs[placement.dim] = _shard_runs(runs[placement.dim], placement, axis_size, position)
    return tuple(runs)


def _flatten_runs(per_dim: tuple[Runs, ...], shape: tuple[int, ...]) -> Runs:
    """Runs over the row-major flattening of the dims."""
    flat: Runs = ((0, 1),)
    for runs, size in zip(per_dim, shape, strict=True):
        if runs == ((0, size),):
            flat = tuple((start * size, stop * size) for start, stop in flat)
        else:
            flat = merge_runs(
                tuple(
                    (i * size + start, i * size + stop)
                    for outer in flat
                    for i in range(*outer)
                    for start, stop in runs
                )
            )
    return flat


def _intersect(runs: Runs, bounds: Range) -> tuple[slice, Runs]:
    """The part of `runs` inside `bounds`: its local positions, and its runs relative to it."""
    low, high = bounds
    position, first, count = 0, 0, 0
    inside: list[Range] = []
    for start, stop in runs:
        a, b = max(start, low), min(stop, high)
        if a < b:
            if not inside:
                first = position + a - start
            inside.append((a - low, b - low))
            count += b - a
        position += stop - start
    return slice(first, first + count), tuple(inside)


def _piece(layout: Layout, block: Block, rank: int) -> Piece | None:
    per_dim = layout.local_runs(rank)
    num_batch = len(block.batch)
    batch_index: list[int | slice] = []
    for i, runs in zip(block.batch, per_dim[:num_batch], strict=True):
        position, inside = _intersect(runs, (i, i + 1))
        if not inside:
            return None
        batch_index.append(position.start)
    row_slice, rows = _intersect(per_dim[num_batch], block.rows)
    cols_runs = _flatten_runs(per_dim[num_batch + 1 :], layout.shape[num_batch + 1 :])
    col_slice, cols = _intersect(cols_runs, block.cols)
    if not rows or not cols:
        return None
    tail: list[int | slice] = [row_slice] if block.flatten else [row_slice, col_slice]
    return Piece((*batch_index, *tail), rows, cols)


@functools.lru_cache(maxsize=4096)
def _pieces(layout: Layout, block: Block) -> Mapping[int, Piece]:
    found = ((rank, _piece(layout, block, rank)) for rank in sorted(layout.ranks))
    return {rank: piece for rank, piece in found if piece is not None}


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
        if process_group is None:
            return single_rank(shape, dist.get_rank() if dist.is_initialized() else 0)
        ranks = tuple(dist.get_process_group_ranks(process_group))
        return Layout(shape, (len(ranks),), ranks, (None,))
    mesh = tensor.device_mesh
    layout = Layout(
        shape,
        tuple(mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
        tuple(_read_placement(fqn, tensor, axis) for axis in range(mesh.ndim)),
    )
    rank, found = dist.get_rank(), tuple(tensor.to_local().shape)
    expected = layout.local_shape(rank) if rank in layout.ranks else found
    if expected != found:
        raise ValueError(
            f"{fqn}: placements {tensor.placements} on a mesh of shape {tuple(mesh.shape)} imply "
            f"a local shape of {expected}, but the local tensor has {found}. Shard it with "
            "distribute_tensor, fully_shard or parallelize_module"
        )
    return layout


def _read_placement(fqn: str, tensor: DTensor, axis: int) -> Sharding | None:
    placement = tensor.placements[axis]
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if dim is None or placement.is_partial():
        raise ValueError(
            f"{fqn}: placement {placement!r} on mesh axis {axis} cannot be optimized; parameters "
            "must be Shard or Replicate on every axis (redistribute it first)"
        )
    return Sharding(dim % tensor.ndim, int(getattr(placement, "split_factor", 1)))


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
