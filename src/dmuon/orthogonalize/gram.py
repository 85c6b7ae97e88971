"""Newton-Schulz in Gram form: the iteration runs on the small M x M matrix `X X^T`.

Zhang, Amsel, Chen and Dao 2026 (Dao-AILab/gram-newton-schulz). A run of steps multiplies X from
the left by a polynomial Q in R = X X^T, so R and Q can be advanced alone and X be touched once.
Rounding makes R slightly indefinite and its small eigenvalues grow with every step, hence the
restarts: X takes in Q, and R is computed afresh.
"""

import itertools
import math
from functools import lru_cache

import torch
from torch import Tensor

from dmuon.orthogonalize.coefficients import Coefficients
from dmuon.orthogonalize.symmetric import SymmetricProduct, dense_product

MAX_RESTARTS = 3
# What rounding may do to an eigenvalue of R, of norm about 1. Zhang et al. use 4e-4 for half.
_HALF_SHIFT, _SINGLE_SHIFT = 4e-4, 1e-5
_LARGEST_CONDITION = {_HALF_SHIFT: 200.0, _SINGLE_SHIFT: 1000.0}
# Measured against float64: up to three steps between restarts the Gram form is as accurate as the
# plain one in float32, for every list in the registry, and the error grows quickly after that.
_SINGLE_SEGMENT = 3
_OVERFLOW = 1e30


def gram_newton_schulz(
    x_BMN: Tensor,
    coefficients: Coefficients,
    *,
    restarts: tuple[int, ...],
    product: SymmetricProduct = dense_product,
) -> Tensor:
    """Apply the quintic iteration of `newton_schulz` through the Gram matrix.

    Costs `4 M^2 N` FLOPs for each of the `len(restarts) + 1` segments, half of the first `2 M^2 N`
    with a `product` that uses symmetry, plus 3 to 4 symmetric `2 M^3` products a step.

    Args:
        x_BMN: Matrices of Frobenius norm at most 1, (B, M, N). Not modified.
        coefficients: One `(a, b, c)` per step.
        restarts: Steps before which R is computed afresh, increasing; from `safe_restarts`.
        product: Computes the symmetric products.
    """
    borders = (0, *restarts, len(coefficients))
    for start, stop in itertools.pairwise(borders):
        gram_BMM = product(x_BMN, x_BMN.mT)
        x_BMN = torch.bmm(_segment_factor(gram_BMM, coefficients[start:stop], product), x_BMN)
    return x_BMN


def _segment_factor(r_BMM: Tensor, segment: Coefficients, product: SymmetricProduct) -> Tensor:
    """Return Q such that the steps of `segment` take X with `X X^T = R` to `Q X`."""
    a, b, c = segment[0]
    z_BMM = product(r_BMM, r_BMM, r_BMM, alpha=c, beta=b)
    q_BMM = z_BMM.clone()
    q_BMM.diagonal(dim1=-2, dim2=-1).add_(a)
    for next_a, b, c in segment[1:]:
        half_BMM = product(r_BMM, z_BMM, r_BMM, beta=a)
        r_BMM = product(half_BMM, z_BMM, half_BMM, beta=a)
        a = next_a
        z_BMM = product(r_BMM, r_BMM, r_BMM, alpha=c, beta=b)
        q_BMM = product(q_BMM, z_BMM, q_BMM, beta=a)
    return q_BMM


def safe_restarts(coefficients: Coefficients, dtype: torch.dtype) -> tuple[int, ...] | None:
    """Return the restarts that keep the Gram form about as accurate as the plain one, or None.

    Half precision: the fewest, and of those the best conditioned. Otherwise every third step. None
    means that no set of at most `MAX_RESTARTS` is safe: the plain form must be used.
    """
    return _search_restarts(coefficients, half=dtype in {torch.float16, torch.bfloat16})


@lru_cache
def _search_restarts(coefficients: Coefficients, *, half: bool) -> tuple[int, ...] | None:
    steps = len(coefficients)
    shift = _HALF_SHIFT if half else _SINGLE_SHIFT
    for size in range(min(MAX_RESTARTS, steps - 1) + 1) if half else [0]:
        choices = itertools.combinations(range(1, steps), size)
        candidates = choices if half else [tuple(range(_SINGLE_SEGMENT, steps, _SINGLE_SEGMENT))]
        condition, restarts = min((condition_number(coefficients, r, shift), r) for r in candidates)
        if condition <= _LARGEST_CONDITION[shift]:
            return restarts
    return None


def condition_number(coefficients: Coefficients, restarts: tuple[int, ...], shift: float) -> float:
    """Return the largest condition number of a segment's Q when rounding has shifted R.

    R's eigenvalues are taken from a grid on [0, 1] and lowered by `shift` at the start of every
    segment (Zhang et al. 2026).
    """
    sigmas = [0.0, *(10 ** (-i / 40) for i in range(201))]
    worst = 1.0
    for start, stop in itertools.pairwise((0, *restarts, len(coefficients))):
        factors = [_segment_gain(s * s - shift, coefficients[start:stop]) for s in sigmas]
        sigmas = [s * q for s, q in zip(sigmas, factors, strict=True)]
        largest, smallest = max(map(abs, factors)), min(map(abs, factors))
        if not largest < _OVERFLOW or smallest == 0:
            return math.inf
        worst = max(worst, largest / smallest)
    return worst


def _segment_gain(r: float, segment: Coefficients) -> float:
    """Return Q's eigenvalue for the eigenvalue `r` of R; infinite once it is out of hand."""
    q = 1.0
    for a, b, c in segment:
        step = a + r * (b + r * c)
        r, q = r * step * step, q * step
        if not abs(q) < _OVERFLOW:
            return math.inf
    return q
