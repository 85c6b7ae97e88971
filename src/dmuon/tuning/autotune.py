"""Times every backend on given shapes, after comparing its result with float64."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from dmuon.newton_schulz.backends import BACKENDS, obstacle
from dmuon.newton_schulz.quintic import Coefficients
from dmuon.newton_schulz.reference import reference_newton_schulz
from dmuon.tuning.batches import orthogonalize_parts
from dmuon.tuning.table import Choice, Table, dtype_name

# Twice the worst relative errors of half precision in Gram form, and float32's with room.
_TOLERANCES = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-3, torch.float64: 1e-9}
# On CPU the engine itself splits a batch into what the caches hold.
_SPLITS = {"cpu": (1,)}
_OTHER_SPLITS = (1, 2, 4, 8)


def tune(
    shapes: Iterable[tuple[int, int, int]],
    *,
    coefficients: Coefficients,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int = 5,
) -> Table:
    """Time every backend that is right on each (batch, rows, columns), and return the fastest.

    A backend that cannot run there, or whose result is off from float64, is left out, and a shape
    for which none remains. In torch's deterministic mode nothing is timed and the table is empty.

    Args:
        shapes: Batches of matrices; a tall shape is timed as its transpose.
        coefficients: One `(a, b, c)` per step.
        dtype: In which to iterate.
        device: Where.
        repeats: Timed runs of each candidate; their median counts.

    Warns:
        UserWarning: A backend failed although it should run there.
    """
    if torch.are_deterministic_algorithms_enabled():
        return Table()
    coefficients = tuple(coefficients)
    choices: list[Choice] = []
    for batch, *sides in shapes:
        rows, columns = sorted(sides)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch, rows, columns, generator=generator).to(device, dtype)
        timed: list[Choice] = []
        for backend in BACKENDS:
            if obstacle(backend, coefficients, device=device, dtype=dtype) is None:
                for split, median in _times(x, backend, coefficients, repeats):
                    key = (dtype_name(dtype), batch, rows, columns, len(coefficients))
                    timed.append(Choice(*key, backend, split, median))
        choices += sorted(timed, key=lambda choice: choice.milliseconds)[:1]
    return Table(choices)


def _times(
    x: Tensor, backend: str, coefficients: Coefficients, repeats: int
) -> Iterator[tuple[int, float]]:
    """Yield the batch splits at which a backend is right, and its median milliseconds."""
    splits = _SPLITS.get(x.device.type, (*_OTHER_SPLITS, len(x)))
    for split in sorted({min(split, len(x)) for split in splits}):
        run = partial(orthogonalize_parts, x, split, coefficients=coefficients, backend=backend)
        try:
            if _is_right(run(), x, coefficients):
                yield split, _milliseconds(run, x.device, repeats)
        except Exception as error:  # noqa: BLE001 - another package's kernel may fail in any way
            warnings.warn(f"{backend} was left out: {error!r}", stacklevel=3)
            return


def _is_right(found: Tensor, x: Tensor, coefficients: Coefficients) -> bool:
    """Return whether a result agrees with float64 on the first and the last matrix of `x`."""
    for index in (0, -1):
        expected = reference_newton_schulz(x[index], coefficients)
        error = (found[index].double() - expected).norm() / expected.norm()
        if not error <= _TOLERANCES[x.dtype]:
            return False
    return True


def _milliseconds(run: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    """Return the median time of `run`, which has run once before."""
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
