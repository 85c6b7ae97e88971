"""How a stack of matrices is iterated: all that its result depends on but rounding."""

import hashlib
from dataclasses import dataclass

import torch

from dmuon.newton_schulz.coefficients import check_safe
from dmuon.newton_schulz.polynomial import Coefficients

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Method:
    """What Newton-Schulz computes, and in which dtype.

    Attributes:
        coefficients: One `(a, b, c)` per step, from `resolve_coefficients`.
        eps: Lower bound of the norm of a matrix whose largest entry has been scaled to 1.
        dtype: In which to iterate. Norms are taken in float32 at least.
        aol: Whether to scale rows first, see `normalize.precondition`.
    """

    coefficients: Coefficients
    eps: float
    dtype: torch.dtype
    aol: bool = False

    @property
    def steps(self) -> int:
        """Number of iterations."""
        return len(self.coefficients)

    @property
    def dtype_name(self) -> str:
        """The dtype as plans and tables name it."""
        return dtype_name(self.dtype)

    def __str__(self) -> str:
        """All of it in short: equal for two ranks exactly if their methods are."""
        first, digest = self.coefficients[0], hashlib.sha256(repr(self.coefficients).encode())
        return (
            f"{self.steps} steps from {', '.join(f'{value:.6g}' for value in first)} "
            f"(list {digest.hexdigest()[:8]}), eps {self.eps!r}, {self.dtype_name}"
            f"{', aol' if self.aol else ''}"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in plans and tables: "float32"."""
    return str(dtype).removeprefix("torch.")


def check_precision(coefficients: Coefficients, dtype: torch.dtype) -> None:
    """Raise a ValueError if a list diverges once every step rounds as `dtype` does."""
    check_safe(coefficients, rounding=torch.finfo(dtype).eps / 2)
