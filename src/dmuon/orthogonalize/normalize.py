"""Scaling each matrix to Frobenius norm 1, whatever the size of its entries."""

import torch
from torch import Tensor


def normalize(x: Tensor, *, eps: float, dtype: torch.dtype) -> Tensor:
    """Return `x` divided, matrix by matrix, by its Frobenius norm; a new tensor of `dtype`.

    Dividing by the largest entry first keeps the squares of very large and very small entries in
    range, so the result is the same for any scale of `x` and `eps` is no floor for small ones. A
    zero matrix stays zero; a matrix with an infinite or NaN entry turns into NaN. Computed in
    float32, float64 for float64 input.

    Args:
        x: Matrices, (..., M, N), not empty. Not modified.
        eps: Lower bound of the norm after the first scaling, where only a zero matrix meets it.
        dtype: Of the result.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    # Division, not multiplication by a reciprocal: 1 / largest overflows for subnormal entries.
    x = x / torch.where(largest == 0, 1, largest)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x.div_(norm.clamp_(min=eps)).to(dtype)
