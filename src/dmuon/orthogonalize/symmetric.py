"""Products whose result is known to be symmetric, on any device: all of it, or half and a mirror.

Shape suffixes: B batch, M the smaller side of a matrix, K the summed dim.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

# Smaller blocks save fewer FLOPs than their GEMMs lose in efficiency.
LARGEST_LEAF = 64


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
    """Compute the lower triangle by recursion over blocks, one GEMM each, and mirror it."""
    size = left_BMK.shape[1]
    result_BMM = left_BMK.new_empty(left_BMK.shape[0], size, size)
    for index, result_MM in enumerate(result_BMM):
        left_MK, right_KM = left_BMK[index], right_BKM[index]
        for rows, columns in _lower_blocks(0, size):
            block = result_MM[rows, columns]
            left, right = left_MK[rows], right_KM[:, columns]
            if add_BMM is None:
                torch.mm(left, right, out=block)
            else:
                add = add_BMM[index, rows, columns]
                torch.addmm(add, left, right, alpha=alpha, beta=beta, out=block)
            if rows != columns:
                result_MM[columns, rows] = block.T
    return result_BMM


def _lower_blocks(start: int, stop: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of blocks that cover the lower triangle of `[start, stop)`."""
    if stop - start <= LARGEST_LEAF:
        yield slice(start, stop), slice(start, stop)
        return
    middle = (start + stop) // 2
    yield slice(middle, stop), slice(start, middle)
    yield from _lower_blocks(start, middle)
    yield from _lower_blocks(middle, stop)
