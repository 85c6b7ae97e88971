"""Which restarts make the Gram form safe for a coefficient list: pure Python.

Between two restarts the Gram form multiplies the matrix by Q, a polynomial in `R = X X^T`. Rounding
makes R slightly indefinite; where Q is badly conditioned on such an R, the result is lost.
"""

import itertools
import math

from dmuon.newton_schulz.polynomial import Coefficients

MAX_RESTARTS = 3
_HALF_ROUNDING = 1e-5
# The search tries every set of restarts: 232 sets for this many steps.
MAX_SEARCHED_STEPS = 12
# What rounding may do to an eigenvalue of R, of norm about 1. Zhang et al. use 4e-4 for half.
_HALF_SHIFT, _SINGLE_SHIFT = 4e-4, 1e-5
_HALF_CONDITION, _SINGLE_CONDITION = 200.0, 1000.0
# Measured against float64: up to three steps between restarts the Gram form is as accurate as the
# plain one in float32, for every list in the registry, and the error grows quickly after that.
_SINGLE_SEGMENT = 3
_OVERFLOW = 1e30


def safe_restarts(coefficients: Coefficients, rounding: float) -> tuple[int, ...] | None:
    """Return the restarts that keep the Gram form about as accurate as the plain one, or None.

    A restart is the number of the step before which `X X^T` is computed afresh. In half precision
    they are the fewest, and of those the best conditioned; otherwise every third step. None means
    that the plain form must be used: the condition is too bad, for half precision with any set of
    up to `MAX_RESTARTS`, or there are more than `MAX_SEARCHED_STEPS` steps to choose from.
    """
    if (coefficients, rounding) not in _FOUND:
        search = _fewest_restarts if rounding > _HALF_ROUNDING else _regular_restarts
        _FOUND[coefficients, rounding] = search(coefficients)
    return _FOUND[coefficients, rounding]


# What was searched for before. `resolve_coefficients` fills it in, so that torch.compile, which
# warns of functools.lru_cache, only has to look.
_FOUND: dict[tuple[Coefficients, float], tuple[int, ...] | None] = {}


def _fewest_restarts(coefficients: Coefficients) -> tuple[int, ...] | None:
    steps = len(coefficients)
    if steps > MAX_SEARCHED_STEPS:
        return None
    for size in range(min(MAX_RESTARTS, steps - 1) + 1):
        sets = itertools.combinations(range(1, steps), size)
        condition, restarts = min((condition_number(coefficients, r, _HALF_SHIFT), r) for r in sets)
        if condition <= _HALF_CONDITION:
            return restarts
    return None


def _regular_restarts(coefficients: Coefficients) -> tuple[int, ...] | None:
    restarts = tuple(range(_SINGLE_SEGMENT, len(coefficients), _SINGLE_SEGMENT))
    condition = condition_number(coefficients, restarts, _SINGLE_SHIFT)
    return restarts if condition <= _SINGLE_CONDITION else None


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
