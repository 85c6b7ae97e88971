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
        seconds: Measured seconds of one matrix by shape (smaller side first), as the autotuner
            records them for one number of steps. Shapes that were not measured are converted from
            FLOPs at the mean measured rate, so measured and estimated costs compare.
    """

    seconds: Mapping[Shape, float] = field(default_factory=dict)

    def cost(self, shape: Shape, steps: int) -> float:
        """Cost of `steps` steps on one matrix; a measured time counts as it was measured."""
        flops = newton_schulz_flops(shape, steps)
        if not self.seconds:
            return float(flops)
        small, large = sorted(shape)
        measured = self.seconds.get((small, large))
        return measured if measured is not None else flops * self._seconds_per_flop(steps)

    def _seconds_per_flop(self, steps: int) -> float:
        flops = sum(newton_schulz_flops(shape, steps) for shape in self.seconds)
        return sum(self.seconds.values()) / flops
