"""Products whose result is known to be symmetric, on any device: all of it, or half and a mirror.

Shape suffixes: B batch, M the smaller side of a matrix, K the summed dim.
"""

from typing import Protocol

import torch
from torch import Tensor

from dmuon.newton_schulz.backend import Product

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
    return add_identity_(result_BMM, gamma)


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
    """View the blocks below the diagonal, one in each pair of blocks, and their mirror images.

    Both are (B, pairs, side, side); the images are transposed back.
    """
    batch, size, _ = x_BMM.shape
    shape, apart = (batch, pairs, side, side), 2 * side * (size + 1)
    below = x_BMM.as_strided(shape, (size * size, apart, size, 1), side * size)
    above = x_BMM.as_strided(shape, (size * size, apart, 1, size), side)
    return below, above


def load_product(product: Product) -> SymmetricProduct:
    """Return the implementation of a product; only now imports what it alone needs."""
    if product == "dense":
        return dense_product
    if product == "blocks":
        return block_product
    if product == "triton":
        from dmuon.newton_schulz.kernels.triton import triton_product  # noqa: PLC0415

        return triton_product
    from dmuon.newton_schulz.kernels.quack import quack_product  # noqa: PLC0415

    return quack_product
