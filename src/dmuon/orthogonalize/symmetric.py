"""Products whose result is known to be symmetric, on any device: all of it, or half and a mirror.

Shape suffixes: B batch, M the smaller side of a matrix, K the summed dim.
"""

from typing import Protocol

import torch
from torch import Tensor

# Smaller blocks save fewer FLOPs than their GEMMs lose in efficiency.
SMALLEST_BLOCK = 64


class SymmetricProduct(Protocol):
    """`alpha * left @ right + beta * add`, or `left @ right`, when the result is symmetric."""

    def __call__(
        self,
        left_BMK: Tensor,
        right_BKM: Tensor,
        add_BMM: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> Tensor:
        """Return a new (B, M, M) tensor. Without `add_BMM`, `alpha` and `beta` have no effect."""
        ...


def dense_product(
    left_BMK: Tensor,
    right_BKM: Tensor,
    add_BMM: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """Compute every entry, with one batched GEMM."""
    if add_BMM is None:
        return torch.bmm(left_BMK, right_BKM)
    return torch.baddbmm(add_BMM, left_BMK, right_BKM, alpha=alpha, beta=beta)


def block_product(
    left_BMK: Tensor,
    right_BKM: Tensor,
    add_BMM: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """Compute little more than the lower triangle, and mirror it.

    The result is halved into blocks again and again. The blocks below the diagonal of one halving
    have one shape, so they share a batched GEMM; what is left are the blocks on the diagonal.
    """
    batch, size = left_BMK.shape[:2]
    depth = halvings(size)
    if depth == 0:
        return dense_product(left_BMK, right_BKM, add_BMM, alpha=alpha, beta=beta)
    result_BMM = left_BMK.new_empty(batch, size, size)
    for level in range(1, depth + 2):
        halves, on_diagonal = 2 ** min(level, depth), level > depth
        rows, columns = _row_blocks(left_BMK, halves), _row_blocks(right_BKM.mT, halves)
        if not on_diagonal:
            rows, columns = rows[:, 1::2], columns[:, ::2]
        add = (
            None if add_BMM is None else _square_blocks(add_BMM, halves, on_diagonal).flatten(0, 1)
        )
        blocks = dense_product(
            rows.flatten(0, 1), columns.flatten(0, 1).mT, add, alpha=alpha, beta=beta
        ).unflatten(0, (batch, -1))
        _square_blocks(result_BMM, halves, on_diagonal).copy_(blocks)
        if not on_diagonal:
            _square_blocks(result_BMM.mT, halves, on_diagonal).copy_(blocks)
    return result_BMM


def halvings(size: int) -> int:
    """How often `block_product` halves a side, to compute `(1 + 2**-halvings) / 2` of it."""
    depth = 0
    while size % 2 == 0 and size // 2 >= SMALLEST_BLOCK:
        size, depth = size // 2, depth + 1
    return depth


def _row_blocks(x_BMK: Tensor, count: int) -> Tensor:
    """View as (B, count, M / count, K)."""
    batch, size, depth = x_BMK.shape
    return x_BMK.view(batch, count, size // count, depth)


def _square_blocks(x_BMM: Tensor, count: int, on_diagonal: bool) -> Tensor:
    """View of the blocks on the diagonal, or below it in pairs of blocks: (B, number, M, M)."""
    batch, size, _ = x_BMM.shape
    side = size // count
    blocks = x_BMM.view(batch, count, side, count, side)
    if not on_diagonal:
        blocks = blocks[:, 1::2, :, ::2]
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
