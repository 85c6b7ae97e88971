"""How a parameter splits into matrices: whole, or in blocks of rows or columns."""

import math
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple, TypeAlias

# A split as groups store it: sizes of the blocks, and the dim of the matrix that they cut.
Blocks: TypeAlias = tuple[tuple[int, ...], int]


class Split(NamedTuple):
    """Blocks of a fused matrix; each block is orthogonalized as a matrix of its own.

    Attributes:
        sizes: Block sizes along `dim`, in order; they sum to that dimension.
        dim: 0 cuts rows (out features), 1 cuts columns (in features) of the matrix.
        num: A number of equal blocks, in place of `sizes`; see `Split.equal`.
    """

    sizes: tuple[int, ...] = ()
    dim: int = 0
    num: int | None = None

    @classmethod
    def equal(cls, num: int, dim: int = 0) -> "Split":
        """Return a split into `num` equal blocks; `num` must divide the dimension it meets."""
        return cls(dim=dim, num=num)


def resolve_split(
    fqn: str, shape: Sequence[int], split: Split | Sequence[Any] | None, flatten: bool
) -> Blocks | None:
    """Return `split` as plain `(sizes, dim)`, checked against a parameter's global shape.

    Args:
        fqn: The parameter's name, for errors.
        shape: Its global logical shape. The matrix is the last two dims, or with `flatten` the
            first dim x all others.
        split: A `Split`, row sizes, a resolved `(sizes, dim)`, or None.
        flatten: Whether the matrix is a flattened convolution.

    Returns:
        `(sizes, dim)`, or None when the matrix stays whole.

    Raises:
        ValueError: `split` is none of these, or its blocks do not fill the dimension.
    """
    if split is None:
        return None
    sizes, dim, num = _read_split(fqn, split)
    found = f"{fqn}: cannot split shape {tuple(shape)}"
    extent = _extent(found, shape, dim, flatten)
    if num is not None:
        if num < 1 or extent % num:
            raise ValueError(f"{found} into {num} equal blocks; use a divisor of {extent}")
        sizes = (extent // num,) * num
    if not sizes or min(sizes) < 1 or sum(sizes) != extent:
        raise ValueError(f"{found} into {sizes}; use positive sizes that sum to {extent}")
    return (sizes, dim) if len(sizes) > 1 else None


def _read_split(fqn: str, split: Split | Sequence[Any]) -> tuple[tuple[int, ...], int, int | None]:
    try:
        if isinstance(split, Split):
            num = None if split.num is None else index(split.num)
            return tuple(map(index, split.sizes)), index(split.dim), num
        if len(split) == 2 and isinstance(split[0], Sequence):
            return tuple(map(index, split[0])), index(split[1]), None
        return tuple(map(index, split)), 0, None
    except TypeError:
        raise ValueError(f"{fqn}: split {split!r} is neither a Split nor row sizes") from None


def _extent(found: str, shape: Sequence[int], dim: int, flatten: bool) -> int:
    """The dimension that a split divides."""
    if len(shape) < 2:
        raise ValueError(f"{found}, it holds no matrix; remove its split")
    if dim not in (0, 1):
        raise ValueError(f"{found} along dim {dim}; use 0 (rows) or 1 (columns of the matrix)")
    if flatten and dim == 1:
        raise ValueError(f"{found} by columns, which mix channels and positions; use dim=0")
    return block_shape(shape, None, flatten)[dim]


def block_shape(shape: Sequence[int], row_blocks: Blocks | None, flatten: bool) -> tuple[int, int]:
    """Return the shape of each matrix of a parameter: the whole, or one of equal blocks of rows."""
    rows, columns = (shape[0], math.prod(shape[1:])) if flatten else (shape[-2], shape[-1])
    return (row_blocks[0][0] if row_blocks else rows), columns
