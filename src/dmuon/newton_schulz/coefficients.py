"""Named coefficient lists for the quintic Newton-Schulz iteration, and the check of given ones."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from dmuon.newton_schulz.polynomial import Coefficients, Triple, deflate, extend, largest_output

MAX_STEPS, DEFAULT_STEPS = 99, 5
# In every precision the singular values of a result are to stay below 1.3. Published lists, with
# the number of steps that they were made for, reach 1.2.
LARGEST_OUTPUT = 1.28

_KELLER: Triple = (3.4445, -4.7750, 2.0315)
_FINISH: Triple = (2.0, -1.5, 0.5)
# Minimax step by step on [1e-3, 1] (arXiv:2505.16932, algorithm 1, solved to the last digit).
_POLAR_EXPRESS: Coefficients = (
    (8.287212018145631, -23.595886519098837, 17.30038731253093),
    (4.107059111542189, -2.947849916737902, 0.5448431082926588),
    (3.9486908534822858, -2.908902115962939, 0.5518191394370116),
    (3.3184196573706033, -2.488488024314876, 0.5100489401237202),
    (2.3006520199548204, -1.6689039845747529, 0.4188073119525677),
    (1.8913014077873973, -1.2679958271945846, 0.37680408948524696),
    (1.8750014808750999, -1.2500016454434482, 0.37500016456914365),
    (1.8749999980500982, -1.2499999961001962, 0.3749999980500981),
    (1.875, -1.25, 0.375),
)
_NANOGPT: Coefficients = (
    (8.156554524902441, -22.48329292557787, 15.878769915207405),
    (4.042929935166732, -2.8089174659087095, 0.5000178451051308),
    (3.8916678022926585, -2.7724841532176803, 0.5060648178503384),
    (3.2857536577556568, -2.36812949334254, 0.4644902423300313),
    (2.346541325859641, -1.7097828382687088, 0.4232355116930528),
)
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


class CoefficientList(NamedTuple):
    """A named list.

    Attributes:
        steps: Number of steps it was made for.
        make: Returns the list for a number of steps.
        source: Where it was published.
    """

    steps: int
    make: Callable[[int], Coefficients]
    source: str


def _deflated(triples: Coefficients, safety: float) -> Coefficients:
    return tuple(deflate(triple, safety) for triple in triples)


def _polar_express(steps: int) -> Coefficients:
    *first, last = extend(_POLAR_EXPRESS, steps)
    return (*_deflated(tuple(first), 1.01), last)


REGISTRY = {
    "original": CoefficientList(
        5,
        lambda steps: (_KELLER,) * steps,
        "Jordan et al. 2024, kellerjordan.github.io/posts/muon; torch.optim.Muon",
    ),
    "polar_express": CoefficientList(
        5,
        _polar_express,
        "Amsel et al. 2025, arXiv:2505.16932; safety 1.01 on all steps but the last",
    ),
    "polar_express_nanogpt": CoefficientList(
        5,
        lambda steps: extend(_NANOGPT, steps),
        "karpathy/nanochat and microsoft/dion: Polar Express built with safety 0.02",
    ),
    "polar_express_gram": CoefficientList(
        5,
        lambda steps: _deflated(extend(_POLAR_EXPRESS, steps), 1.05),
        "Dao-AILab/gram-newton-schulz: Polar Express with safety 1.05 on every step",
    ),
    "you": CoefficientList(
        5, lambda steps: extend(_YOU, steps), "YouJiacheng 2025, in KellerJordan/modded-nanogpt"
    ),
    "cans": CoefficientList(
        5,
        lambda steps: extend(_CANS, steps),
        "Grishina et al. 2025, arXiv:2506.10935, as listed in NVIDIA-NeMo/Emerging-Optimizers",
    ),
    "deepseek_v4": CoefficientList(
        10,
        lambda steps: ((_KELLER,) * (steps - 2) + (_FINISH,) * 2)[:steps],
        "DeepSeek-V4 report 2026: eight original steps, then two of (2, -1.5, 0.5)",
    ),
    "turbo": CoefficientList(
        4,
        lambda steps: extend(_TURBO, steps),
        "Boissin et al. 2025, arXiv:2512.04632, list of thib-s/flash-newton-schulz; made for AOL",
    ),
}


def resolve_coefficients(
    spec: str | Triple | Sequence[Triple], steps: int | None = None
) -> Coefficients:
    """Return one `(a, b, c)` per step, checked to be safe on every input in exact arithmetic.

    Args:
        spec: A name in `REGISTRY`; one `(a, b, c)`, repeated (`ns_coefficients` of
            `torch.optim.Muon`); or one `(a, b, c)` per step.
        steps: Number of steps, 1 to 99. None: the length of the list (5 for a single triple).
            Fewer steps than a list take its first ones, more repeat its last.

    Raises:
        ValueError: Unknown name, malformed list, bad `steps`, or a list that maps part of (0, 1]
            to negative values or far above 1.
    """
    if steps is not None and not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"ns_steps must be between 1 and {MAX_STEPS}, got {steps}")
    given = spec if isinstance(spec, str) else _as_triples(spec)
    if (given, steps) not in _RESOLVED:
        if not isinstance(given, str):
            coefficients = extend(given, steps)
        elif given in REGISTRY:
            coefficients = REGISTRY[given].make(steps or REGISTRY[given].steps)
        else:
            raise ValueError(f"unknown ns_coefficients {given!r}; known names: {sorted(REGISTRY)}")
        check_safe(coefficients)
        _RESOLVED[given, steps] = coefficients
    return _RESOLVED[given, steps]


# What was asked for before: torch.compile, which warns of functools.lru_cache, only has to look.
_RESOLVED: dict[tuple[str | Coefficients, int | None], Coefficients] = {}


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
