"""Lists of odd quintic polynomials, as plain data: no tensors.

A list is one `(a, b, c)` per step. Step k maps every singular value `s` of the normalised matrix to
`p_k(s) = a s + b s^3 + c s^5`; the whole list maps it to `p_K(...p_1(s))`.
"""

import math
from collections.abc import Iterable
from typing import TypeAlias

Triple: TypeAlias = tuple[float, float, float]
Coefficients: TypeAlias = tuple[Triple, ...]


def evaluate(sigma: float, coefficients: Iterable[Triple]) -> float:
    """Return where the list maps one singular value: `p_K(...p_1(sigma))`."""
    for a, b, c in coefficients:
        square = sigma * sigma
        sigma = sigma * (a + square * (b + square * c))
    return sigma


def extend(triples: Coefficients, steps: int | None) -> Coefficients:
    """Return the first `steps` triples, the last one repeated; all of them for None."""
    steps = steps or len(triples)
    return triples[:steps] + triples[-1:] * (steps - len(triples))


def deflate(triple: Triple, factor: float) -> Triple:
    """Return the triple of `p(s / factor)`: room for rounding to push `s` above 1."""
    a, b, c = triple
    return (a / factor, b / factor**3, c / factor**5)


def largest_output(coefficients: Coefficients, rounding: float = 0.0) -> float:
    """Return the largest value that the list maps (0, 1] to; infinity if any becomes negative."""
    # A step is continuous and maps 0 to 0, so all of (0, largest] occurs before the next one.
    largest = 1.0
    for triple in coefficients:
        stop = largest * (1 + rounding)
        extremes = [stop, *(s for s in _turning_points(triple) if s < stop)]
        values = [evaluate(s, (triple,)) for s in extremes]
        if triple[0] <= 0 or min(values) <= 0:
            return math.inf
        largest = max(values)
    return largest


def _turning_points(triple: Triple) -> list[float]:
    """Return the positive roots of `a + 3 b s^2 + 5 c s^4`."""
    a, b, c = triple
    discriminant = 9 * b * b - 20 * a * c
    if discriminant < 0:
        return []
    # Of the two forms of a root the one without cancellation.
    q = -(3 * b + math.copysign(math.sqrt(discriminant), b)) / 2
    squares = [a / q if q else 0.0, q / (5 * c) if c else 0.0]
    return [math.sqrt(square) for square in squares if square > 0]
