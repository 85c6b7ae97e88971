"""Products whose result is known to be symmetric, on any device: all of it, or half and a mirror.

Shape suffixes: B batch, M the smaller side of a matrix, K the summed dim.
"""

from typing import Protocol

import torch
from torch import Tensor

# Smaller blocks save fewer FLOPs than their GEMMs lose in efficiency.
SMALLEST_BLOCK = 64


class SymmetricProduct(Protocol):
    """`alpha * left @ right + beta * add + gamma * I`, when the result is symmetric."""

    def __call__(
        self,
        left_BMK: Tensor,
        right_BKM: Tensor,
        add_BMM: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        gamma: float = 0.0,
    ) -> Tensor:
        """Return a new (B, M, M) tensor in the dtype of the factors."""
        ...


def dense_product(
    left_BMK: Tensor,
    right_BKM: Tensor,
    add_BMM: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 0.0,
) -> Tensor:
    """Compute every entry, with one batched GEMM."""
    if add_BMM is not None:
        result_BMM = torch.baddbmm(add_BMM, left_BMK, right_BKM, alpha=alpha, beta=beta)
    else:
        result_BMM = torch.bmm(left_BMK, right_BKM)
        if alpha != 1:
            result_BMM.mul_(alpha)
    if gamma != 0:
        result_BMM.diagonal(dim1=-2, dim2=-1).add_(gamma)
    return result_BMM


def block_product(
    left_BMK: Tensor,
    right_BKM: Tensor,
    add_BMM: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 0.0,
) -> Tensor:
    """Compute little more than the lower triangle, and mirror it.

    The result is halved into blocks again and again. The blocks below the diagonal of one halving
    have one shape, so they share a batched GEMM; what is left are the blocks on the diagonal.
    """
    batch, size, depth = left_BMK.shape
    result_BMM = left_BMK.new_empty(batch, size, size)
    columns_BMK = right_BKM.mT
    side = size
    while side > diagonal_side(size):
        side //= 2
        lower = left_BMK.view(batch, -1, 2, side, depth)[:, :, 1].flatten(0, 1)
        upper = columns_BMK.view(batch, -1, 2, side, depth)[:, :, 0].flatten(0, 1)
        blocks = torch.bmm(lower, upper.mT).unflatten(0, (batch, -1))
        _square_blocks(result_BMM, side, step=2, row=1).copy_(blocks)
        _square_blocks(result_BMM, side, step=2, column=1).copy_(blocks.mT)
    rows = left_BMK.view(batch, -1, side, depth).flatten(0, 1)
    columns = columns_BMK.view(batch, -1, side, depth).flatten(0, 1)
    blocks = torch.bmm(rows, columns.mT).unflatten(0, (batch, -1))
    _square_blocks(result_BMM, side, step=1).copy_(blocks)
    if alpha != 1:
        result_BMM.mul_(alpha)
    if add_BMM is not None:
        result_BMM.add_(add_BMM, alpha=beta)
    if gamma != 0:
        result_BMM.diagonal(dim1=-2, dim2=-1).add_(gamma)
    return result_BMM


def diagonal_side(size: int) -> int:
    """Side of the blocks on the diagonal, down to which `block_product` halves."""
    while size % 2 == 0 and size // 2 >= SMALLEST_BLOCK:
        size //= 2
    return size


def _square_blocks(x_BMM: Tensor, side: int, *, step: int, row: int = 0, column: int = 0) -> Tensor:
    """View of every `step`-th block from (`row`, `column`) down the diagonal: (B, number, M, M)."""
    batch, size, _ = x_BMM.shape
    return x_BMM.as_strided(
        (batch, size // (step * side), side, side),
        (size * size, step * side * (size + 1), size, 1),
        side * (row * size + column),
    )
