"""From matrices to the nearest semi-orthogonal ones: one function for users, one for a step.

Shape suffixes: B batch, M the smaller side of a matrix, N the larger.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon.newton_schulz.ambient import exact_arithmetic
from dmuon.newton_schulz.backend import PLAIN, Backend
from dmuon.newton_schulz.choice import cached_parts, choose_backend, load_product, obstacle
from dmuon.newton_schulz.coefficients import resolve_coefficients
from dmuon.newton_schulz.gram import gram_newton_schulz
from dmuon.newton_schulz.method import DTYPES, Method, check_precision
from dmuon.newton_schulz.normalize import normalize, precondition
from dmuon.newton_schulz.plain import newton_schulz
from dmuon.newton_schulz.polynomial import Triple
from dmuon.newton_schulz.restarts import safe_restarts


def orthogonalize(
    x: Tensor,
    *,
    coefficients: str | Triple | Sequence[Triple] = "original",
    steps: int | None = None,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    backend: Backend | str = "auto",
    aol: bool = False,
) -> Tensor:
    """Return the nearest semi-orthogonal matrix to each matrix in `x`, approximately.

    The result is `U p(S) V^T` for `x / ||x||_F = U S V^T`, where `p` is the scalar map of the
    coefficient list (Jordan et al. 2024, kellerjordan.github.io/posts/muon). It does not depend on
    the scale of `x`; a zero matrix gives zero; a matrix with an infinite or NaN entry gives NaN and
    leaves the others of its batch alone. Nothing ambient changes it, see `exact_arithmetic`.

    Args:
        x: Matrices, (..., M, N), floating point, any strides. Not modified; no gradient flows.
        coefficients: A named list, one `(a, b, c)` for every step, or one per step; see
            `resolve_coefficients`.
        steps: Number of steps; None is the length of the list, 5 for a single triple.
        eps: Lower bound of the norm of a matrix whose largest entry has been scaled to 1.
        dtype: In which to iterate; None is the dtype of `x`. Norms are taken in float32 at least.
        backend: A `Backend` or its text, such as "gram+triton", used or refused, never replaced;
            or "auto", see `choose_backend`. While compiling, "auto" is plain tensor code.
        aol: Whether to scale rows first, see `precondition`; made for the "turbo" coefficients.

    Returns:
        A new tensor with the shape and dtype of `x`.

    Raises:
        ValueError: `x` has fewer than 2 dims, or it or `dtype` is not real floating point;
            `coefficients` are unknown, malformed or unsafe in that precision; `backend` is unknown,
            cannot run on `x`, or is a Gram form without safe restarts for `coefficients`.
    """
    dtype = dtype or x.dtype
    if x.ndim < 2 or x.dtype not in DTYPES or dtype not in DTYPES:
        raise ValueError(
            f"orthogonalize needs real floating-point matrices, (..., M, N); got {x.dtype} of "
            f"shape {tuple(x.shape)}, to be iterated in {dtype}"
        )
    method = Method(resolve_coefficients(coefficients, steps), eps, dtype, aol)
    if not torch.compiler.is_compiling():
        check_precision(method.coefficients, dtype)
    named = Backend.parse(backend) if isinstance(backend, str) and backend != "auto" else backend
    if x.numel() == 0:
        return torch.empty_like(x)
    tall = x.shape[-2] > x.shape[-1]
    x_BMN = x.detach().reshape(-1, *x.shape[-2:])
    if tall:
        x_BMN = x_BMN.mT
    chosen, parts = _choose(x_BMN, method, named)
    with exact_arithmetic(x.device.type):
        y_BMN = orthogonalize_stack(x_BMN, method, chosen, parts)
    return (y_BMN.mT if tall else y_BMN).reshape(x.shape)


def _choose(x_BMN: Tensor, method: Method, named: Backend | str) -> tuple[Backend, int]:
    """Return what iterates a stack, and in how many parts.

    Raises:
        ValueError: The named backend cannot run on it.
    """
    batch, *shape = x_BMN.shape
    compiling = torch.compiler.is_compiling()
    wide = (shape[0], shape[1])
    parts = 1 if compiling else cached_parts(batch, wide, method.dtype, x_BMN.device.type)
    if isinstance(named, Backend):
        reason = obstacle(named, method.coefficients, x_BMN.device, method.dtype)
        if reason is not None:
            raise ValueError(f"backend '{named}' {reason}; use another one or 'auto'")
        return named, parts
    if compiling:
        return PLAIN, parts
    device_type = x_BMN.device.type
    chosen = choose_backend(wide, method.coefficients, dtype=method.dtype, device_type=device_type)
    return chosen, parts


def orthogonalize_stack(
    stack_BMN: Tensor, method: Method, backend: Backend, parts: int = 1
) -> Tensor:
    """Return `orthogonalize` of each matrix of a stack: what a step calls. Nothing is checked.

    Args:
        stack_BMN: Matrices, (B, M, N) with M <= N, none of the three 0. Not modified.
        method: What to compute, checked by `check_precision`.
        backend: With what; one without `obstacle`.
        parts: In how many parts, one after the other; at most B.

    Returns:
        A new tensor of the shape and dtype of the stack.

    The caller enters `exact_arithmetic`, once for any number of stacks.
    """
    if parts == 1:
        return _iterate(stack_BMN, method, backend)
    return torch.cat([_iterate(part, method, backend) for part in stack_BMN.tensor_split(parts)])


def _iterate(stack_BMN: Tensor, method: Method, backend: Backend) -> Tensor:
    y_BMN = normalize(stack_BMN, eps=method.eps)
    if method.aol:
        y_BMN = precondition(y_BMN)
    y_BMN = y_BMN.to(method.dtype)
    coefficients, product = method.coefficients, load_product(backend.product)
    if backend.form == "gram":
        restarts = safe_restarts(coefficients, method.dtype) or ()
        y_BMN = gram_newton_schulz(y_BMN, coefficients, restarts=restarts, product=product)
    else:
        y_BMN = newton_schulz(y_BMN, coefficients, product=product)
    return y_BMN.to(stack_BMN.dtype)
