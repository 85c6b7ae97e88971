"""How often the Gram form must start afresh, found by trying it with the rounding of a dtype.

Between two restarts the Gram form advances `R = X X^T` and a polynomial Q in it without looking at
X (Zhang et al. 2026). Rounding makes R slightly indefinite, and a product that computes one
triangle and mirrors it takes R and Q out of step: where a list is steep, both grow at every step.
The condition number of Q does not tell when: in bfloat16 restarts that it admits give singular
values of 2 to 25. So a candidate is tried, on small matrices with the spectra that show it (the
growth does not depend on size), and with one bit less than the dtype has: what is stable hardly
changes then, what is not blows up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dmuon.newton_schulz.ambient import exact_arithmetic
from dmuon.newton_schulz.coefficients import LARGEST_OUTPUT
from dmuon.newton_schulz.gram import gram_newton_schulz
from dmuon.newton_schulz.polynomial import Coefficients, largest_output
from dmuon.newton_schulz.products import Terms, dense_product

# Steps between restarts, the cheapest first. Starting afresh at every step saves nothing over the
# plain form; after more than three even float32 loses digits, for every list.
PERIODS = (3, 2)
# What rounding may add to the largest singular value of the list in exact arithmetic.
MARGIN = 0.1
_SIZES, _SEEDS = (8, 16), 8


def safe_restarts(coefficients: Coefficients, dtype: torch.dtype) -> tuple[int, ...] | None:
    """Return the fewest regular restarts that are safe for a list in a dtype, or None.

    A restart is the number of the step before which `X X^T` is computed afresh. None means that
    the plain form must be used.
    """
    if (coefficients, dtype) not in _FOUND:
        _FOUND[coefficients, dtype] = _search(coefficients, dtype)
    return _FOUND[coefficients, dtype]


# What was searched for before, so that torch.compile only has to look.
_FOUND: dict[tuple[Coefficients, torch.dtype], tuple[int, ...] | None] = {}


def _search(coefficients: Coefficients, dtype: torch.dtype) -> tuple[int, ...] | None:
    limit = min(largest_output(coefficients) + MARGIN, LARGEST_OUTPUT)
    product = _CoarseProduct(round(-math.log2(torch.finfo(dtype).eps)))
    with torch.no_grad(), exact_arithmetic("cpu"):
        batches = [torch.cat(list(_hard_matrices(size))) for size in _SIZES]
        for period in PERIODS:
            restarts = tuple(range(period, len(coefficients), period))
            results = (
                gram_newton_schulz(x, coefficients, restarts=restarts, product=product)
                for x in batches
            )
            if all(y.isfinite().all() and _spectral_norm(y) <= limit for y in results):
                return restarts
    return None


def _spectral_norm(y_BMM: Tensor) -> float:
    return float(torch.linalg.svdvals(y_BMM).max())


class _CoarseProduct:
    """A `SymmetricProduct` in float64 that rounds once to some bits, and mirrors the lower half."""

    def __init__(self, bits: int) -> None:
        # Veltkamp: what is left of x * factor - (x * factor - x) has `bits` significant bits.
        self._factor = 2.0 ** (53 - bits) + 1

    def __call__(self, left_BMK: Tensor, right_BKM: Tensor, terms: Terms) -> Tensor:
        total_BMM = dense_product(left_BMK, right_BKM, terms)
        scaled_BMM = total_BMM * self._factor
        lower_BMM = (scaled_BMM - (scaled_BMM - total_BMM)).tril_()
        return lower_BMM + lower_BMM.tril(-1).mT


def _hard_matrices(size: int) -> Iterator[Tensor]:
    """Yield batches of matrices of Frobenius norm 1, each with one spectrum."""
    i = torch.arange(size, dtype=torch.float64, device="cpu")
    generator = torch.Generator("cpu").manual_seed(size)
    halves = [torch.where(i < size // 2, 1.0, 10.0**-k) for k in range(5)]
    ones = [torch.where(i < 1, 1.0, small) for small in (0.0, 1e-3)]
    thirds = torch.where(i < size // 3, 1.0, torch.where(i < 2 * size // 3, 0.3, 0.01))
    steep = [10.0 ** (-k * i / (size - 1)) for k in (3, 6)]
    shape = (2, _SEEDS, size, size)
    for sigma in (*halves, *ones, thirds, *steep):
        noise = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        u, v = torch.linalg.qr(noise)[0]
        yield (u * (sigma / sigma.norm())) @ v.mT
