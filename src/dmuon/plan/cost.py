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
