"""Lists of odd quintic polynomials, as plain data: no tensors.

A list is one `(a, b, c)` per step. Step k maps every singular value `s` of the normalised matrix to
`p_k(s) = a s + b s^3 + c s^5`; the whole list maps it to `p_K(...p_1(s))`.
"""

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
