"""What is orthogonalized: a matrix, and the piece of it that one rank stores.

Legend: a parameter's logical (global) shape is read as `(*batch, M, N)`, or as `(M, N)` after
flattening everything behind the first dim (convolutions). Ranges are half open.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Range = tuple[int, int]
Runs = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Where a matrix lies in its parameter.

    Attributes:
        batch: Index in the leading (stacked) dims; empty for a plain 2-D weight.
        rows: Rows of the `(M, N)` view, half open.
        cols: Columns of the `(M, N)` view, half open.
        flatten: The view is `shape[0] x rest` of the parameter instead of its last two dims.
    """

    batch: tuple[int, ...]
    rows: Range
    cols: Range
    flatten: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Logical shape of the matrix, `(rows, cols)`."""
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One unit that is orthogonalized once per step in the whole job.

    Attributes:
        fqn: Fully qualified name of the parameter it belongs to.
        block: Where in the parameter it lies.
    """

    fqn: str
    block: Block

    @property
    def shape(self) -> tuple[int, int]:
        """Logical shape, `(rows, cols)`; what learning-rate scales and costs read."""
        return self.block.shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def sort_key(self) -> tuple[str, tuple[int, ...], Range, Range]:
        """A total order that is the same on every rank."""
        return self.fqn, self.block.batch, self.block.rows, self.block.cols

    def __str__(self) -> str:
        batch = "".join(f"[{i}]" for i in self.block.batch)
        (r0, r1), (c0, c1) = self.block.rows, self.block.cols
        return f"{self.fqn}{batch}[{r0}:{r1}, {c0}:{c1}]"


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a matrix that one rank stores; never empty.

    Attributes:
        index: Selects the piece from the rank's local tensor, always as a view.
        rows: Rows of the matrix it covers, ascending and disjoint, relative to the matrix.
        cols: Columns of the matrix it covers, likewise.
    """

    index: tuple[int | slice, ...]
    rows: Runs
    cols: Runs

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns."""
        return runs_size(self.rows), runs_size(self.cols)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def runs_size(runs: Runs) -> int:
    """Number of indices that `runs` cover."""
    return sum(stop - start for start, stop in runs)


def matrices_of(
    fqn: str,
    shape: Sequence[int],
    *,
    flatten: bool = False,
    split: tuple[tuple[int, ...], int] | None = None,
) -> tuple[Matrix, ...]:
    """List the matrices of one parameter, in storage order.

    Args:
        fqn: Fully qualified name of the parameter.
        shape: Logical (global) shape, at least 2-D.
        flatten: Read the parameter as `shape[0] x rest` (convolutions) instead of as a stack.
        split: `(sizes, dim)`: cut rows (dim 0) or columns (dim 1) into blocks of these sizes.

    Returns:
        One `Matrix` per stacked slice and block.
    """
    batch_dims = () if flatten else tuple(shape[:-2])
    rows, cols = shape[len(batch_dims)], math.prod(shape[len(batch_dims) + 1 :])
    sizes, dim = split if split is not None else ((rows,), 0)
    stops = list(itertools.accumulate(sizes))
    cuts = list(zip([0, *stops[:-1]], stops, strict=True))
    blocks = [(cut, (0, cols)) if dim == 0 else ((0, rows), cut) for cut in cuts]
    return tuple(
        Matrix(fqn, Block(batch, *block, flatten))
        for batch in itertools.product(*map(range, batch_dims))
        for block in blocks
    )
