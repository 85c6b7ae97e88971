"""Generates the Polar Express lists (Amsel et al. 2025, arXiv:2505.16932) that dmuon prints."""

import math
from functools import lru_cache

from dmuon.newton_schulz.polynomial import Coefficients, Triple, deflate, evaluate

# With it, safety 0 reproduces the table printed in arXiv:2505.16932 to 14 digits.
_CUSHION = 0.02407327424182761


def _optimal_quintic(lower: float, upper: float) -> Triple:
    """Return the odd quintic closest to 1 on `[lower, upper]`, by Remez exchange."""
    if lower / upper >= 1 - 5e-6:
        return (15 / 8 / upper, -10 / 8 / upper**3, 3 / 8 / upper**5)
    inner_left, inner_right = (3 * lower + upper) / 4, (lower + 3 * upper) / 4
    error, previous = math.inf, -math.inf
    a = b = c = 0.0
    while abs(error - previous) > 1e-15:
        previous = error
        points = (lower, inner_left, inner_right, upper)
        rows = [[s, s**3, s**5, (-1.0) ** i, 1.0] for i, s in enumerate(points)]
        a, b, c, error = _solve(rows)
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner_left = math.sqrt((-3 * b - root) / (10 * c))
        inner_right = math.sqrt((-3 * b + root) / (10 * c))
    return (a, b, c)


def _solve(rows: list[list[float]]) -> list[float]:
    """Solve a small dense system given as rows of `[coefficients..., right side]`."""
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(size):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


@lru_cache
def minimax_composition(
    steps: int, *, lower: float = 1e-3, safety: float = 0.0, cushion: float = _CUSHION
) -> Coefficients:
    """Return the Polar Express list (Amsel et al. 2025, arXiv:2505.16932): minimax step by step.

    Args:
        steps: Number of triples.
        lower: Smallest singular value, relative to the norm, that is to be mapped near 1.
        safety: Each step but the last is deflated by `1 + safety` as the list is built.
        cushion: Smallest `lower / upper` that a step is designed for.
    """
    upper = 1.0
    triples: list[Triple] = []
    for step in range(steps):
        triple = _optimal_quintic(max(lower, cushion * upper), upper)
        if cushion * upper > lower:
            centre = (evaluate(lower, (triple,)) + evaluate(upper, (triple,))) / 2
            a, b, c = triple
            triple = (a / centre, b / centre, c / centre)
        if step < steps - 1:
            triple = deflate(triple, 1 + safety)
        triples.append(triple)
        lower = evaluate(lower, (triple,))
        upper = 2 - lower
    return tuple(triples)
