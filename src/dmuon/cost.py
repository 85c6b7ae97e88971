"""What it costs to orthogonalize a matrix: FLOPs, or measured seconds where they are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Shape = tuple[int, int]


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
        seconds_per_step: Measured seconds of one step on one matrix by shape (smaller side first).
            Shapes that were not measured are converted from FLOPs at the mean measured rate, so
            measured and estimated costs compare.
    """

    seconds_per_step: Mapping[Shape, float] = field(default_factory=dict)

    def cost(self, shape: Shape, steps: int) -> float:
        """Cost of `steps` steps on one matrix."""
        small, large = sorted(shape)
        measured = self.seconds_per_step.get((small, large))
        if measured is not None:
            return steps * measured
        return newton_schulz_flops(shape, steps) * self._seconds_per_flop()

    def _seconds_per_flop(self) -> float:
        if not self.seconds_per_step:
            return 1.0
        flops = sum(newton_schulz_flops(shape, 1) for shape in self.seconds_per_step)
        return sum(self.seconds_per_step.values()) / flops
