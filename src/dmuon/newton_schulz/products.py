"""Products whose result is known to be symmetric, on any device: all of it, or half and a mirror.

Shape suffixes: B batch, M the smaller side of a matrix, K the summed dim.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

# Smaller blocks save fewer FLOPs than their GEMMs lose in efficiency.
SMALLEST_BLOCK = 64


class Terms(NamedTuple):
    """What becomes of a product P: `alpha P + beta add + gamma I`."""

    alpha: float = 1.0
    add: Tensor | None = None
    beta: float = 1.0
    gamma: float = 0.0


# From the factors (B, M, K) and (B, K, M) to a new (B, M, M) in their dtype.
SymmetricProduct: TypeAlias = Callable[[Tensor, Tensor, Terms], Tensor]
ALONE = Terms()


def dense_product(left_BMK: Tensor, right_BKM: Tensor, terms: Terms) -> Tensor:
    """Compute every entry, with one batched GEMM: a `SymmetricProduct`."""
    alpha, add_BMM, beta, gamma = terms
    if add_BMM is not None:
        result_BMM = torch.baddbmm(add_BMM, left_BMK, right_BKM, alpha=alpha, beta=beta)
    else:
        result_BMM = torch.bmm(left_BMK, right_BKM)
        if alpha != 1:
            result_BMM.mul_(alpha)
    return add_identity_(result_BMM, gamma)


def block_product(left_BMK: Tensor, right_BKM: Tensor, terms: Terms) -> Tensor:
    """Compute little more than the lower triangle, and mirror it: a `SymmetricProduct`.

    The result is halved into blocks again and again. The blocks below the diagonal of one halving
    have one shape, so they share a batched GEMM; what is left are the blocks on the diagonal.
    """
    alpha, add_BMM, beta, gamma = terms
    batch, size, depth = left_BMK.shape
    columns_BMK = right_BKM.mT
    result_BMM = left_BMK.new_empty(batch, size, size)
    side, smallest = size, diagonal_side(size)
    while side > smallest:
        side //= 2
        pairs = size // (2 * side)
        lower = left_BMK.view(batch, pairs, 2, side, depth)[:, :, 1].flatten(0, 1)
        upper = columns_BMK.view(batch, pairs, 2, side, depth)[:, :, 0].flatten(0, 1)
        blocks = torch.bmm(lower, upper.mT).view(batch, pairs, side, side)
        below, above = _blocks(result_BMM, side, pairs)
        below.copy_(blocks)
        above.copy_(blocks)
    number = size // side
    rows = left_BMK.view(batch, number, side, depth).flatten(0, 1)
    columns = columns_BMK.view(batch, number, side, depth).flatten(0, 1)
    blocks = torch.bmm(rows, columns.mT).view(batch, number, side, side)
    result_BMM.view(batch, number, side, number, side).diagonal(dim1=1, dim2=3).copy_(
        blocks.permute(0, 2, 3, 1)
    )
    if alpha != 1:
        result_BMM.mul_(alpha)
    if add_BMM is not None:
        result_BMM.add_(add_BMM, alpha=beta)
    return add_identity_(result_BMM, gamma)


def add_identity_(x_BMM: Tensor, gamma: float) -> Tensor:
    """Add `gamma * I` to each matrix, in place."""
    if gamma != 0:
        x_BMM.diagonal(dim1=-2, dim2=-1).add_(gamma)
    return x_BMM


def diagonal_side(size: int) -> int:
    """Side of the blocks on the diagonal, down to which `block_product` halves."""
    while size % 2 == 0 and size // 2 >= SMALLEST_BLOCK:
        size //= 2
    return size


def _blocks(x_BMM: Tensor, side: int, pairs: int) -> tuple[Tensor, Tensor]:
    """View the blocks (B, pairs, side, side) below the diagonal, and their places above it.

    Pair p holds rows and columns from `2 p side` on, so the pairs lie `2 side (size + 1)` apart.
    The block below starts `side` rows down; its image, transposed, `side` columns to the right.
    """
    batch, size, _ = x_BMM.shape
    shape, apart = (batch, pairs, side, side), 2 * side * (size + 1)
    below = x_BMM.as_strided(shape, (size * size, apart, size, 1), side * size)
    above = x_BMM.as_strided(shape, (size * size, apart, 1, size), side)
    return below, above
