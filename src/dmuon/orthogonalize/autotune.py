"""Measured times of every backend by shape, kept on disk per device.

A table is data: `orthogonalize_tuned` follows it, and its `milliseconds` can stand in for FLOPs in
a cost model. Nothing is tuned or looked up behind a caller's back, so two ranks cannot come to
choose differently.
"""

import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from dmuon.orthogonalize.coefficients import Coefficients
from dmuon.orthogonalize.engine import BACKENDS, orthogonalize
from dmuon.orthogonalize.reference import reference_newton_schulz

CACHE_VERSION = 1
# Twice the worst relative errors of half precision in Gram form, and float32's with room.
_TOLERANCES = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-3, torch.float64: 1e-9}


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest correct way to orthogonalize a batch of one shape."""

    dtype: str
    batch: int
    rows: int
    columns: int
    backend: str
    split: int
    milliseconds: float

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What the choice is for."""
        return (self.dtype, self.batch, self.rows, self.columns)


Table = dict[tuple[str, int, int, int], Choice]


def tune(
    shapes: Iterable[tuple[int, int, int]],
    *,
    coefficients: Coefficients,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int = 5,
) -> Table:
    """Time every backend that is right on each (batch, rows, columns), and return the fastest.

    A backend whose result is off from float64 is left out. In torch's deterministic mode nothing is
    timed and the table is empty.

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
        name = str(dtype).removeprefix("torch.")
        choices = [
            Choice(name, batch, rows, columns, backend, split, _time(run, x, repeats))
            for backend in BACKENDS
            for split in sorted({1, batch})
            if _is_right(run := _runner(backend, split, coefficients), x, coefficients)
        ]
        best = min(choices, key=lambda choice: choice.milliseconds)
        table[best.key] = best
    return table


def orthogonalize_tuned(
    x: Tensor, table: Table, *, coefficients: Coefficients, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return `orthogonalize(x)` by the backend and batch split that a table names for its shape.

    The entry of the nearest batch size counts; a shape that is not in the table, and everything in
    torch's deterministic mode, goes to "auto".

    Args:
        x: Matrices, (B, M, N) with M <= N. Not modified.
        table: From `tune` or `load`.
        coefficients: One `(a, b, c)` per step.
        eps: As in `orthogonalize`.
        dtype: In which to iterate.
    """
    batch, rows, columns = x.shape
    name = str(dtype).removeprefix("torch.")
    known = [c for c in table.values() if (c.dtype, c.rows, c.columns) == (name, rows, columns)]
    if not known or torch.are_deterministic_algorithms_enabled():
        return orthogonalize(x, coefficients=coefficients, eps=eps, dtype=dtype)
    choice = min(known, key=lambda choice: (abs(choice.batch - batch), choice.batch))
    parts = [
        orthogonalize(part, coefficients=coefficients, eps=eps, dtype=dtype, backend=choice.backend)
        for part in x.tensor_split(min(choice.split, batch))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def seconds_per_matrix(table: Table) -> dict[tuple[int, int], float]:
    """Return the measured seconds for one matrix of each (rows, columns), for a cost model.

    Of several batch sizes the smallest counts, of several dtypes the slowest.
    """
    smallest: dict[tuple[str, int, int], Choice] = {}
    for choice in sorted(table.values(), key=lambda choice: choice.key):
        smallest.setdefault((choice.dtype, choice.rows, choice.columns), choice)
    times: dict[tuple[int, int], float] = {}
    for (_, *shape), choice in smallest.items():
        rows, columns = shape
        seconds = choice.milliseconds / choice.batch / 1e3
        times[rows, columns] = max(seconds, times.get((rows, columns), 0.0))
    return times


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
    """Return whether `run` can take `x` and agrees with float64 on its first and last matrix."""
    try:
        found = run(x)
    except (ValueError, ImportError):
        return False
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


def device_name(device: torch.device) -> str:
    """Return the name that tables for `device` are kept under."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return "".join(c if c.isalnum() else "_" for c in name)
    return f"{device.type}_{torch.get_num_threads()}_threads"


def cache_path(folder: Path, device: torch.device) -> Path:
    """Return the file in `folder` that holds the table of `device`."""
    return folder / f"{device_name(device)}.v{CACHE_VERSION}.json"


def load(path: Path) -> Table:
    """Return the table in `path`; empty if there is none, or none that can be read."""
    try:
        rows = json.loads(path.read_text())
        choices = [Choice(**row) for row in rows]
        usable = all(
            choice.backend in BACKENDS and float(choice.milliseconds) > 0 for choice in choices
        )
        return {choice.key: choice for choice in choices} if usable else {}
    except (OSError, ValueError, TypeError):
        return {}


def load_strict(path: str | os.PathLike[str]) -> Table:
    """Return the table in `path`, which the caller relies on.

    Raises:
        ValueError: There is no table that can be read.
    """
    table = load(Path(path))
    if not table:
        raise ValueError(
            f"tuning {str(path)!r}: no table can be read there; write one with `dmuon tune`"
        )
    return table


def save(path: Path, table: Table) -> None:
    """Merge `table` into the file at `path`.

    The file is replaced in one operation, so a reader sees the old or the new one. Of two
    writers at once the later wins, and the other's choices are tuned again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = sorted({**load(path), **table}.items())
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump([asdict(choice) for _, choice in merged], file, indent=1)
    try:
        os.replace(file.name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise


def format_table(table: Table) -> str:
    """Return the choices as aligned text, one a line."""
    lines: list[tuple[str, ...]] = [("dtype", "batch", "rows", "columns", "backend", "split", "ms")]
    for _, choice in sorted(table.items()):
        *fields, milliseconds = asdict(choice).values()
        lines.append((*map(str, fields), f"{milliseconds:.3f}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
