"""Which restarts make the Gram form safe for a coefficient list: pure Python.

Between two restarts the Gram form multiplies the matrix by Q, a polynomial in `R = X X^T`. Rounding
makes R slightly indefinite; where Q is badly conditioned on such an R, the result is lost.
"""

import itertools
import math

from dmuon.orthogonalize.quintic import Coefficients

MAX_RESTARTS = 3
# What rounding may do to an eigenvalue of R, of norm about 1. Zhang et al. use 4e-4 for half.
_HALF_SHIFT, _SINGLE_SHIFT = 4e-4, 1e-5
_LARGEST_CONDITION = {_HALF_SHIFT: 200.0, _SINGLE_SHIFT: 1000.0}
# Measured against float64: up to three steps between restarts the Gram form is as accurate as the
# plain one in float32, for every list in the registry, and the error grows quickly after that.
_SINGLE_SEGMENT = 3
_OVERFLOW = 1e30


def safe_restarts(coefficients: Coefficients, *, half: bool) -> tuple[int, ...] | None:
    """Return the restarts that keep the Gram form about as accurate as the plain one, or None.

    A restart is the number of the step before which `X X^T` is computed afresh. Half precision: the
    fewest, and of those the best conditioned. Otherwise every third step. None means that no set of
    at most `MAX_RESTARTS` is safe: the plain form must be used.
    """
    if (coefficients, half) not in _FOUND:
        _FOUND[coefficients, half] = _search_restarts(coefficients, half=half)
    return _FOUND[coefficients, half]


# What was searched for before; torch.compile warns of functools.lru_cache and looks into this.
_FOUND: dict[tuple[Coefficients, bool], tuple[int, ...] | None] = {}


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
