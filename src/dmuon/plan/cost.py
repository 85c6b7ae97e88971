"""What it costs to orthogonalize matrices: FLOPs, or measured times where they are known."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from dmuon.newton_schulz.backend import Backend

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest correct way to orthogonalize a batch of one shape.

    Attributes:
        dtype: Name of the dtype in which to iterate, such as "float32".
        batch: Number of matrices.
        rows: Their smaller side.
        columns: Their larger side.
        steps: Newton-Schulz steps that were timed.
        backend: What was fastest.
        parts: In how many parts, one after the other.
        milliseconds: Time of the whole batch.

    Raises:
        ValueError: A size is no positive integer, or the time no positive number.
    """

    dtype: str
    batch: int
    rows: int
    columns: int
    steps: int
    backend: Backend
    parts: int
    milliseconds: float

    def __post_init__(self) -> None:
        sizes = (self.batch, self.rows, self.columns, self.steps, self.parts)
        if any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(f"sizes must be positive integers, got {sizes}")
        if self.rows > self.columns or not 0 < self.milliseconds < math.inf:
            raise ValueError(f"{self} is no measurement")

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """What the choice is for."""
        return (self.dtype, self.batch, self.rows, self.columns, self.steps)

    @property
    def seconds(self) -> float:
        """Of one step of the whole batch."""
        return self.milliseconds / self.steps / 1e3


@dataclass(frozen=True)
class Timings:
    """Measured choices for any number of shapes, dtypes, batch sizes and numbers of steps.

    Plain data that a job shares: ranks with equal timings choose alike.

    Attributes:
        choices: All of them, ordered by what they are for; of several for the same the last.
    """

    choices: tuple[Choice, ...] = ()

    def __post_init__(self) -> None:
        by_key = {choice.key: choice for choice in self.choices}
        object.__setattr__(self, "choices", tuple(by_key[key] for key in sorted(by_key)))

    @cached_property
    def digest(self) -> str:
        """Short hash, by which ranks compare their timings."""
        return hashlib.sha256(repr(self.choices).encode()).hexdigest()[:8]

    def find(self, dtype: str, steps: int, batch: int, shape: Shape) -> Choice | None:
        """Return the choice of the nearest number of steps and batch for a wide shape, if any."""
        known = self._known(dtype, steps, shape)
        return min(known, key=lambda c: (abs(c.batch - batch), c.batch), default=None)

    def seconds(self, dtype: str, steps: int, batch: int, shape: Shape) -> float | None:
        """Return the measured seconds of one step of a batch, or None for an unknown shape.

        Interpolated linearly between measured batch sizes, and proportional beyond them.
        """
        known = self._known(dtype, steps, shape)
        below = max((c for c in known if c.batch <= batch), key=lambda c: c.batch, default=None)
        above = min((c for c in known if c.batch >= batch), key=lambda c: c.batch, default=None)
        if below is None or above is None or below is above:
            nearest = below or above
            return None if nearest is None else nearest.seconds * batch / nearest.batch
        weight = (batch - below.batch) / (above.batch - below.batch)
        return (1 - weight) * below.seconds + weight * above.seconds

    def seconds_per_step(self) -> dict[tuple[str, Shape], float]:
        """Return the measured seconds of a step on one matrix, by dtype and shape, for `CostModel`.

        Of several batch sizes the smallest counts.
        """
        return {key: known[0].seconds / known[0].batch for key, known in self._by_shape.items()}

    @cached_property
    def _by_shape(self) -> dict[tuple[str, Shape], list[Choice]]:
        by_shape: dict[tuple[str, Shape], list[Choice]] = {}
        for choice in self.choices:
            key = (choice.dtype, (choice.rows, choice.columns))
            by_shape.setdefault(key, []).append(choice)
        return by_shape

    def _known(self, dtype: str, steps: int, shape: Shape) -> list[Choice]:
        """Return the choices of the nearest number of steps."""
        known = self._by_shape.get((dtype, shape), [])
        nearest = min((c.steps for c in known), key=lambda s: (abs(s - steps), s), default=0)
        return [choice for choice in known if choice.steps == nearest]


def newton_schulz_flops(shape: Shape, steps: int) -> int:
    """Floating-point operations of plain quintic Newton-Schulz on one matrix.

    With m <= n, one step is `A = X X^T` (2 m^2 n), `A A` (2 m^3) and `B X` (2 m^2 n), so
    `steps * (4 m^2 n + 2 m^3)`.
    """
    m, n = sorted(shape)
    return steps * (4 * m * m * n + 2 * m**3)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of orthogonalizing one matrix, in FLOPs or in units proportional to them.

    Attributes:
        seconds_per_step: Measured seconds of one step on one matrix, by the dtype of Newton-Schulz
            and the shape (smaller side first). Shapes that were not measured are converted from
            FLOPs at the mean rate measured in that dtype, or in any if there is none, so measured
            and estimated costs compare.
    """

    seconds_per_step: Mapping[tuple[str, Shape], float] = field(default_factory=dict)

    def cost(self, shape: Shape, steps: int, ns_dtype: str) -> float:
        """Cost of `steps` steps on one matrix."""
        small, large = sorted(shape)
        measured = self.seconds_per_step.get((ns_dtype, (small, large)))
        if measured is not None:
            return steps * measured
        return newton_schulz_flops(shape, steps) * self._seconds_per_flop(ns_dtype)

    def _seconds_per_flop(self, ns_dtype: str) -> float:
        times = self.seconds_per_step
        if not times:
            return 1.0
        keys = [key for key in times if key[0] == ns_dtype] or list(times)
        flops = sum(newton_schulz_flops(shape, 1) for _, shape in keys)
        return sum(times[key] for key in keys) / flops
