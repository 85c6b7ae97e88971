"""Who stores which piece, in pure Python.

A `Layout` is (global shape, mesh shape, ranks, placements), and every question is answered from it
alone, so each rank knows what every other rank stores without asking. It follows
`torch.distributed.tensor`: placements apply from left to right, `Shard` cuts
like `torch.chunk` (the last shards may be smaller or empty), and `_StridedShard` (FSDP2 over
tensor parallelism) cuts each of `split_factor` chunks and joins the results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

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
