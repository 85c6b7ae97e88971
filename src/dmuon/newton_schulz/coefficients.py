"""Named coefficient lists for the quintic Newton-Schulz iteration, and the check of given ones."""

import cmath
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from dmuon.newton_schulz.polar_express import minimax_composition
from dmuon.newton_schulz.polynomial import Coefficients, Triple, deflate, evaluate, extend

MAX_STEPS, DEFAULT_STEPS = 99, 5
# In every precision the singular values of a result stay below 1.3. Published lists, with the
# numbers of steps that they were made for, reach 1.2.
LARGEST_OUTPUT = 1.28

_KELLER: Triple = (3.4445, -4.7750, 2.0315)
_YOU: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_CANS: Coefficients = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
_TURBO: Coefficients = (
    (4.6051, -9.6552, 5.6769),
    (4.7505, -6.0861, 2.1790),
    (2.7763, -2.3190, 0.5523),
    (2.4231, -2.2861, 0.8193),
)
_FINISH: Triple = (2.0, -1.5, 0.5)


@dataclass(frozen=True, slots=True)
class CoefficientList:
    """A named family of coefficient lists, one list for every number of steps.

    Attributes:
        name: What `resolve_coefficients` knows it by.
        source: Where it was published.
        default_steps: Number of steps it was made for.
        make: Returns the list for a number of steps.
    """

    name: str
    source: str
    default_steps: int
    make: Callable[[int], Coefficients]


def _polar_express(steps: int) -> Coefficients:
    raw = minimax_composition(steps)
    return (*(deflate(triple, 1.01) for triple in raw[:-1]), raw[-1])


_LISTS = (
    CoefficientList(
        "original",
        "Jordan et al. 2024, kellerjordan.github.io/posts/muon; torch.optim.Muon",
        5,
        lambda steps: (_KELLER,) * steps,
    ),
    CoefficientList(
        "polar_express",
        "Amsel et al. 2025, arXiv:2505.16932; safety 1.01 on all steps but the last",
        5,
        _polar_express,
    ),
    CoefficientList(
        "polar_express_nanogpt",
        "karpathy/nanochat and microsoft/dion: Polar Express built with safety 0.02",
        5,
        lambda steps: minimax_composition(steps, safety=0.02, cushion=0.02),
    ),
    CoefficientList(
        "polar_express_gram",
        "Dao-AILab/gram-newton-schulz: Polar Express with safety 1.05 on every step",
        5,
        lambda steps: tuple(deflate(triple, 1.05) for triple in minimax_composition(steps)),
    ),
    CoefficientList(
        "you",
        "YouJiacheng 2025, in KellerJordan/modded-nanogpt",
        5,
        lambda steps: extend(_YOU, steps),
    ),
    CoefficientList(
        "cans",
        "Grishina et al. 2025, arXiv:2506.10935, as listed in NVIDIA-NeMo/Emerging-Optimizers",
        5,
        lambda steps: extend(_CANS, steps),
    ),
    CoefficientList(
        "deepseek_v4",
        "DeepSeek-V4 report 2026: eight original steps, then two of (2, -1.5, 0.5)",
        10,
        lambda steps: ((_KELLER,) * (steps - 2) + (_FINISH,) * 2)[:steps],
    ),
    CoefficientList(
        "turbo",
        "Boissin et al. 2025, arXiv:2512.04632, list of thib-s/flash-newton-schulz; made for AOL",
        4,
        lambda steps: extend(_TURBO, steps),
    ),
)
REGISTRY = {entry.name: entry for entry in _LISTS}


def resolve_coefficients(
    spec: str | Triple | Sequence[Triple], steps: int | None = None
) -> Coefficients:
    """Return one `(a, b, c)` per step, checked to be safe on every input in exact arithmetic.

    Args:
        spec: A name in `REGISTRY`; one `(a, b, c)`, repeated (`ns_coefficients` of
            `torch.optim.Muon`); or one `(a, b, c)` per step.
        steps: Number of steps, 1 to 99. None: the length of the list (5 for a single triple).
            Fewer steps than a given list take its first ones, more repeat its last; a named
            family has a list of its own for every number of steps.

    Raises:
        ValueError: Unknown name, malformed list, bad `steps`, or a list that maps part of (0, 1]
            to negative values or far above 1.
    """
    if steps is not None and not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"ns_steps must be between 1 and {MAX_STEPS}, got {steps}")
    given = spec if isinstance(spec, str) else _as_triples(spec)
    if (given, steps) not in _RESOLVED:
        coefficients = _named(given, steps) if isinstance(given, str) else extend(given, steps)
        check_safe(coefficients)
        _RESOLVED[given, steps] = coefficients
    return _RESOLVED[given, steps]


# What was asked for before: torch.compile, which warns of functools.lru_cache, only has to look.
_RESOLVED: dict[tuple[str | Coefficients, int | None], Coefficients] = {}


def _named(name: str, steps: int | None) -> Coefficients:
    if name not in REGISTRY:
        raise ValueError(f"unknown ns_coefficients {name!r}; known names: {sorted(REGISTRY)}")
    entry = REGISTRY[name]
    return entry.make(steps or entry.default_steps)


def _as_triples(spec: Triple | Sequence[Triple]) -> Coefficients:
    """Return finite triples, five of a single one; or say in a ValueError what is wrong."""
    expected = "ns_coefficients must be a name, one (a, b, c), or a sequence of (a, b, c)"
    items: tuple[object, ...] = tuple(spec)
    if len(items) == 3 and all(isinstance(item, (int, float)) for item in items):
        items = (items,) * DEFAULT_STEPS
    if not items:
        raise ValueError(f"{expected}; got an empty sequence")
    triples = []
    for item in items:
        try:
            a, b, c = (float(value) for value in cast("Sequence[float]", item))
        except (TypeError, ValueError):
            raise ValueError(f"{expected}; found {item!r}") from None
        if not all(map(math.isfinite, (a, b, c))):
            raise ValueError(f"ns_coefficients must be finite; found {item!r}")
        triples.append((a, b, c))
    return tuple(triples)


def check_safe(coefficients: Coefficients, rounding: float = 0.0) -> None:
    """Raise a ValueError if the list maps a value in (0, 1] to something negative or far above 1.

    Such a list would move part of the weights uphill, or blow up.

    Args:
        coefficients: One `(a, b, c)` per step.
        rounding: Relative error that makes the input of every step too large, such as half the
            machine epsilon of the dtype in which the matrices are iterated.
    """
    largest = largest_output(coefficients, rounding)
    if not largest <= LARGEST_OUTPUT:
        what = "diverges" if math.isfinite(largest) else "flips the sign of some singular values"
        where = f" when every step rounds by {rounding:.1g}" if rounding else ""
        raise ValueError(
            f"ns_coefficients {coefficients} {what}{where}: use a list that maps (0, 1] into "
            f"(0, {LARGEST_OUTPUT:g}] ({largest:.4g} here) by "
            f"{'a wider dtype' if rounding else 'more steps'} or other coefficients"
        )


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
    if c == 0:
        squares = [-a / (3 * b)] if b else []
    else:
        root = cmath.sqrt(9 * b * b - 20 * a * c)
        squares = [((sign * root - 3 * b) / (10 * c)).real for sign in (1, -1) if not root.imag]
    return [math.sqrt(square) for square in squares if square > 0]
