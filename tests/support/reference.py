"""What `orthogonalize` must compute, in float64 and as few lines as possible: the oracle."""

import torch
from torch import Tensor

from dmuon.newton_schulz.polynomial import Coefficients


def reference_orthogonalize(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Return `U p(S) V^T` for each matrix `x = ||x||_F U S V^T`, by SVD in float64.

    `p` is the scalar map of the coefficient list. A zero matrix gives zero.
    """
    u, sigma, vh = torch.linalg.svd(_normalized(x), full_matrices=False)
    mapped: Tensor = u @ (map_singular_values(sigma, coefficients).unsqueeze(-1) * vh)
    return mapped


def reference_newton_schulz(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Return the plain iteration on each matrix in `x`, in float64."""
    y = _normalized(x)
    for a, b, c in coefficients:
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y


def map_singular_values(sigma: Tensor, coefficients: Coefficients) -> Tensor:
    """Return `p_K(...p_1(sigma))`, with `p_k(s) = a s + b s^3 + c s^5`, elementwise."""
    for a, b, c in coefficients:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def _normalized(x: Tensor) -> Tensor:
    """Return `x` in float64 over its Frobenius norm, zero for a zero matrix."""
    x = x.to(torch.float64)
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    x = x / torch.where(largest == 0, 1, largest)
    norm = x.pow(2).sum(dim=(-2, -1), keepdim=True).sqrt()
    return x / torch.where(norm == 0, 1, norm)


def with_spectrum(sigma: Tensor, length: int, seed: int = 0) -> Tensor:
    """Return a float32 matrix (len(sigma), length) with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    size = len(sigma)
    u, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(length, size, generator=generator, dtype=torch.float64))
    return ((u * sigma) @ v.mT).float()
