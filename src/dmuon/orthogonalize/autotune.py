"""Times every backend on given shapes, after comparing its result with float64."""

import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dmuon.orthogonalize.backends import BACKENDS, obstacle
from dmuon.orthogonalize.engine import orthogonalize
from dmuon.orthogonalize.quintic import Coefficients
from dmuon.orthogonalize.reference import reference_newton_schulz
from dmuon.orthogonalize.table import Choice, Table, dtype_name

# Twice the worst relative errors of half precision in Gram form, and float32's with room.
_TOLERANCES = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-3, torch.float64: 1e-9}
_SPLITS = (1, 2, 4, 8)


def tune(
    shapes: Iterable[tuple[int, int, int]],
    *,
    coefficients: Coefficients,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int = 5,
) -> Table:
    """Time every backend that is right on each (batch, rows, columns), and return the fastest.

    A backend that cannot run there, or whose result is off from float64, is left out. In torch's
    deterministic mode nothing is timed and the table is empty.

    Args:
        shapes: Batches of matrices; a tall shape is timed as its transpose.
        coefficients: One `(a, b, c)` per step.
        dtype: In which to iterate.
        device: Where.
        repeats: Timed runs of each candidate; their median counts.
    """
    table: Table = {}
    if torch.are_deterministic_algorithms_enabled():
        return table
    for batch, *sides in shapes:
        rows, columns = sorted(sides)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch, rows, columns, generator=generator).to(device, dtype)
        runs = {
            (backend, split): _runner(backend, split, coefficients)
            for backend in BACKENDS
            if obstacle(backend, coefficients, device=device, dtype=dtype) is None
            for split in sorted({min(split, batch) for split in (*_SPLITS, batch)})
        }
        times = {
            key: _time(run, x, repeats)
            for key, run in runs.items()
            if _is_right(run, x, coefficients)
        }
        (backend, split), milliseconds = min(times.items(), key=lambda item: item[1])
        best = Choice(
            dtype_name(dtype), batch, rows, columns, len(coefficients), backend, split, milliseconds
        )
        table[best.key] = best
    return table


def _runner(backend: str, split: int, coefficients: Coefficients) -> Callable[[Tensor], Tensor]:
    """Return a function that runs `backend` on `split` parts of a batch in turn."""

    def run(x: Tensor) -> Tensor:
        parts = [
            orthogonalize(part, coefficients=coefficients, backend=backend)
            for part in x.tensor_split(split)
        ]
        return parts[0] if split == 1 else torch.cat(parts)

    return run


def _is_right(run: Callable[[Tensor], Tensor], x: Tensor, coefficients: Coefficients) -> bool:
    """Return whether `run` agrees with float64 on the first and the last matrix of `x`."""
    found = run(x)
    for index in (0, -1):
        expected = reference_newton_schulz(x[index], coefficients)
        error = (found[index].double() - expected).norm() / expected.norm()
        if not error <= _TOLERANCES[x.dtype]:
            return False
    return True


def _time(run: Callable[[Tensor], Tensor], x: Tensor, repeats: int) -> float:
    """Return the median milliseconds of `run(x)`, which has run once before."""
    times = []
    for _ in range(repeats):
        _synchronize(x)
        start = time.perf_counter()
        run(x)
        _synchronize(x)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _synchronize(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
