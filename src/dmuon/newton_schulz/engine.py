"""The entry of the engine: normalise, bring to B x M x N with M <= N, iterate, bring back."""

import torch
from torch import Tensor

from dmuon.newton_schulz.backends import DTYPES, HALF, iteration, split_name
from dmuon.newton_schulz.coefficients import check_safe
from dmuon.newton_schulz.normalize import normalize, precondition
from dmuon.newton_schulz.quintic import Coefficients
from dmuon.newton_schulz.restarts import safe_restarts
from dmuon.newton_schulz.symmetric import diagonal_side

# Measured on CPU. Where halving takes less off a side, blocks do not pay for their copies.
SMALLEST_HALVED = 240
# Below, or for M x N nearer to a square, the plain form is as fast as the Gram form.
SMALLEST_GRAM = 128
GRAM_ASPECT = 2
# What is iterated at a time, so that it stays in the caches; the best of 0.5 to 8 MiB.
CACHE_BYTES = 2 * 2**20


def orthogonalize(
    x: Tensor,
    *,
    coefficients: Coefficients,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    aol: bool = False,
) -> Tensor:
    """Return the nearest semi-orthogonal matrix to each matrix in `x`, approximately.

    The result is `U p(S) V^T` for `x / ||x||_F = U S V^T`, where `p` is the scalar map of the
    coefficient list (Jordan et al. 2024, kellerjordan.github.io/posts/muon). It does not depend on
    the scale of `x`; a zero matrix gives zero; a matrix with an infinite or NaN entry gives NaN and
    leaves the others of its batch alone.

    Args:
        x: Matrices, (..., M, N), floating point, any strides. Not modified.
        coefficients: One `(a, b, c)` per step, from `resolve_coefficients`.
        eps: Lower bound of the norm of a matrix whose largest entry has been scaled to 1.
        dtype: In which to iterate; None is the dtype of `x`. Norms are taken in float32.
        backend: One of `BACKENDS`, used or refused, never replaced; or "auto", see
            `choose_backend`.
        aol: Whether to scale rows first, see `precondition`; made for the "turbo" coefficients.

    Returns:
        A new tensor with the shape and dtype of `x`.

    Raises:
        ValueError: `x` has fewer than 2 dims, or it or `dtype` is not real floating point;
            `coefficients` diverge in that precision; `backend` is unknown, cannot run on `x`, or is
            a Gram form without safe restarts for `coefficients`.
    """
    dtype = dtype or x.dtype
    if x.ndim < 2 or not {x.dtype, dtype} <= DTYPES:
        raise ValueError(
            f"orthogonalize needs real floating-point matrices, (..., M, N); got {x.dtype} of "
            f"shape {tuple(x.shape)}, to be iterated in {dtype}"
        )
    if backend != "auto":
        split_name(backend)
    coefficients = tuple(coefficients)
    if not torch.compiler.is_compiling():
        check_precision(coefficients, dtype)
    if x.numel() == 0:
        return torch.empty_like(x)
    x_BMN = x.detach().reshape(-1, *x.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x_BMN = x_BMN.mT
    parts = []
    for part_BMN in _cached_parts(x_BMN, dtype):
        y_BMN = normalize(part_BMN, eps=eps)
        if aol:
            y_BMN = precondition(y_BMN)
        y_BMN = y_BMN.to(dtype)
        name = choose_backend(y_BMN, coefficients) if backend == "auto" else backend
        parts.append(iteration(name, y_BMN, coefficients)(y_BMN))
    y_BMN = parts[0] if len(parts) == 1 else torch.cat(parts)
    if tall:
        y_BMN = y_BMN.mT
    return y_BMN.reshape(x.shape).to(x.dtype)


def check_precision(coefficients: Coefficients, dtype: torch.dtype) -> None:
    """Raise a ValueError if a list diverges once every step rounds as `dtype` does."""
    check_safe(coefficients, rounding=torch.finfo(dtype).eps / 2)


def choose_backend(x_BMN: Tensor, coefficients: Coefficients) -> str:
    """Return what "auto" runs for normalised matrices (B, M, N) with M <= N.

    A function of M, N, dtype, device type and the list alone, so every rank chooses the same, and
    the same for any number of matrices. While compiling, only pure tensor code is chosen.
    """
    size, length = x_BMN.shape[-2:]
    if x_BMN.device.type != "cpu" or torch.compiler.is_compiling() or x_BMN.dtype in HALF:
        return "newton_schulz"
    long = size >= SMALLEST_GRAM and length >= GRAM_ASPECT * size
    gram = long and safe_restarts(coefficients, half=False) is not None
    form = "gram" if gram else "newton_schulz"
    return form + "_blocks" if size - diagonal_side(size) >= SMALLEST_HALVED else form


def _cached_parts(x_BMN: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Split a batch on CPU into what the caches hold in `dtype`, or single matrices."""
    if x_BMN.device.type != "cpu" or torch.compiler.is_compiling():
        return (x_BMN,)
    size, length = x_BMN.shape[-2:]
    # The matrix and its successor, the Gram matrix and the update.
    matrix_bytes = 2 * size * (length + size) * dtype.itemsize
    parts: tuple[Tensor, ...] = torch.split(x_BMN, max(1, CACHE_BYTES // matrix_bytes))
    return parts
