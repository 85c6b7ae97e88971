"""Scaling each matrix to a spectral norm of at most 1, whatever the size of its entries."""

import torch
from torch import Tensor


def normalize(x: Tensor, *, eps: float) -> Tensor:
    """Return `x` divided, matrix by matrix, by its Frobenius norm: a new tensor.

    Dividing by the largest entry first keeps the squares of very large and very small entries in
    range, so the result is the same for any scale of `x` and `eps` is no floor for small ones. A
    zero matrix stays zero; a matrix with an infinite or NaN entry turns into NaN. In float32;
    float64 for float64 input.

    Args:
        x: Matrices, (..., M, N), not empty. Not modified.
        eps: Lower bound of the norm after the first scaling, where only a zero matrix meets it.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    # On CPU vector_norm of order inf takes ten times as long.
    largest = torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))
    # Division, not multiplication by a reciprocal: 1 / largest overflows for subnormal entries.
    x = x / largest.clamp_(min=torch.finfo(x.dtype).tiny)
    # Row by row first: one sum over all entries would lose digits that steep lists show again.
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1), dim=-1)
    return x.div_(norm.clamp_(min=eps)[..., None, None])


def precondition(x_BMN: Tensor) -> Tensor:
    """Return each matrix with its rows scaled so that its spectral norm is at most 1 (AOL).

    Row i is divided by `sqrt(sum_j |x x^T|_ij)` (Boissin et al. 2025, arXiv:2512.04632). The
    singular values end closer to 1 than after division by the Frobenius norm, which saves a step,
    but the rows change in proportion: the polar factor is that of the scaled matrix.
    """
    sums_BM1 = torch.bmm(x_BMN, x_BMN.mT).abs_().sum(dim=-1, keepdim=True)
    return x_BMN / torch.where(sums_BM1 == 0, 1, sums_BM1).sqrt_()
