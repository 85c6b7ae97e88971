"""The entry of the engine: normalise, bring to B x M x N with M <= N, iterate, bring back."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dmuon.orthogonalize.coefficients import Coefficients
from dmuon.orthogonalize.gram import gram_newton_schulz, safe_restarts
from dmuon.orthogonalize.newton_schulz import newton_schulz
from dmuon.orthogonalize.normalize import normalize, precondition
from dmuon.orthogonalize.symmetric import SymmetricProduct, block_product, dense_product

# Measured with benchmarks/orthogonalize.py: below, blocks are too small to fill a GEMM.
SMALLEST_BLOCKED = 256


def _triton_product(x: Tensor) -> SymmetricProduct:
    """Return the Triton product, imported only here: it needs a GPU."""
    if x.device.type != "cuda":
        raise ValueError(f"the Triton backends need a CUDA tensor, got one on {x.device}")
    from dmuon.orthogonalize.kernels.symmetric import triton_product  # noqa: PLC0415

    return triton_product


def _block_product(x: Tensor) -> SymmetricProduct:
    if x.device.type != "cpu":
        raise ValueError(f"the block backends need a CPU tensor, got one on {x.device}")
    return block_product


_FORMS = ("newton_schulz", "gram")
_PRODUCTS: dict[str, Callable[[Tensor], SymmetricProduct]] = {
    "": lambda x: dense_product,
    "_blocks": _block_product,
    "_triton": _triton_product,
}
BACKENDS = tuple(form + product for form in _FORMS for product in _PRODUCTS)


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
        ValueError: `x` has fewer than 2 dims or is not real floating point; `backend` is unknown,
            cannot run on `x`, or is a Gram form without safe restarts for `coefficients`.
    """
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(
            f"orthogonalize needs real floating-point matrices, (..., M, N); got {x.dtype} of "
            f"shape {tuple(x.shape)}"
        )
    if x.numel() == 0:
        return torch.empty_like(x)
    x_BMN = x.detach().reshape(-1, *x.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x_BMN = x_BMN.mT
    coefficients = tuple(coefficients)
    y_BMN = normalize(x_BMN, eps=eps)
    if aol:
        y_BMN = precondition(y_BMN)
    y_BMN = y_BMN.to(dtype or x.dtype)
    if backend == "auto":
        backend = choose_backend(y_BMN, coefficients)
    y_BMN = _iteration(backend, y_BMN, coefficients)(y_BMN)
    if tall:
        y_BMN = y_BMN.mT
    return y_BMN.reshape(x.shape).to(x.dtype)


def choose_backend(x_BMN: Tensor, coefficients: Coefficients) -> str:
    """Return what "auto" runs for normalised matrices (B, M, N) with M <= N.

    A function of M, N, dtype, device type and the list alone, so every rank chooses the same, and
    the same for any number of matrices. While compiling, only pure tensor code is chosen.
    """
    size, length = x_BMN.shape[-2:]
    if x_BMN.device.type != "cpu" or torch.compiler.is_compiling():
        return "newton_schulz"
    if size < SMALLEST_BLOCKED or x_BMN.dtype not in {torch.float32, torch.float64}:
        return "newton_schulz"
    long = length >= 3 * size // 2
    form = "gram" if long and safe_restarts(coefficients, x_BMN.dtype) is not None else _FORMS[0]
    return form + "_blocks"


def _iteration(backend: str, x: Tensor, coefficients: Coefficients) -> Callable[[Tensor], Tensor]:
    """Return the named iteration, or raise a ValueError if it cannot run on `x`."""
    form = "gram" if backend.startswith("gram") else "newton_schulz"
    product = _PRODUCTS.get(backend.removeprefix(form))
    if backend not in BACKENDS or product is None:
        raise ValueError(f"unknown backend {backend!r}; known: {('auto', *BACKENDS)}")
    if form == "newton_schulz":
        return partial(newton_schulz, coefficients=coefficients, product=product(x))
    restarts = safe_restarts(coefficients, x.dtype)
    if restarts is None:
        raise ValueError(
            f"no restarts make the Gram form safe in {x.dtype} for coefficients {coefficients}; "
            "use backend='newton_schulz' or 'auto'"
        )
    return partial(
        gram_newton_schulz, coefficients=coefficients, restarts=restarts, product=product(x)
    )
