"""Measured choices by shape, kept on disk per device: what `autotune` writes and others follow.

A table is data: it names a backend for each shape, and its times can stand in for FLOPs in a cost
model. Nothing is looked up behind a caller's back, so two ranks cannot come to choose differently.
"""

import contextlib
import json
import os
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dmuon.orthogonalize.backends import BACKENDS

CACHE_VERSION = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest correct way to orthogonalize a batch of one shape.

    Attributes:
        dtype: In which to iterate.
        batch: Number of matrices.
        rows: Their smaller side.
        columns: Their larger side.
        steps: Newton-Schulz steps that were timed.
        backend: What was fastest.
        split: In how many parts, one after the other.
        milliseconds: Median time of the whole batch.
    """

    dtype: str
    batch: int
    rows: int
    columns: int
    steps: int
    backend: str
    split: int
    milliseconds: float

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What the choice is for."""
        return (self.dtype, self.batch, self.rows, self.columns)


Table = dict[tuple[str, int, int, int], Choice]


def find(table: Table, dtype: torch.dtype, batch: int, rows: int, columns: int) -> Choice | None:
    """Return the entry for a shape with the nearest batch size, or None."""
    known = _known(table, dtype, rows, columns)
    return min(known, key=lambda choice: (abs(choice.batch - batch), choice.batch), default=None)


def batch_seconds(
    table: Table, dtype: torch.dtype, batch: int, rows: int, columns: int
) -> float | None:
    """Return the measured seconds of a batch, or None for a shape that is not in the table.

    Interpolated linearly between measured batch sizes, and proportional beyond them.
    """
    known = _known(table, dtype, rows, columns)
    if not known:
        return None
    below = max((c for c in known if c.batch <= batch), key=lambda c: c.batch, default=known[0])
    above = min((c for c in known if c.batch >= batch), key=lambda c: c.batch, default=known[-1])
    if below.batch == above.batch or not below.batch <= batch <= above.batch:
        nearest = above if batch <= above.batch else below
        return nearest.milliseconds / 1e3 * batch / nearest.batch
    weight = (batch - below.batch) / (above.batch - below.batch)
    return ((1 - weight) * below.milliseconds + weight * above.milliseconds) / 1e3


def seconds_per_step(table: Table) -> dict[tuple[int, int], float]:
    """Return the measured seconds of a step on one matrix of each (rows, columns).

    Of several batch sizes the smallest counts, of several dtypes the slowest.
    """
    smallest: dict[tuple[str, int, int], Choice] = {}
    for choice in sorted(table.values(), key=lambda choice: choice.key):
        smallest.setdefault((choice.dtype, choice.rows, choice.columns), choice)
    times: dict[tuple[int, int], float] = defaultdict(float)
    for choice in smallest.values():
        seconds = choice.milliseconds / choice.batch / choice.steps / 1e3
        shape = (choice.rows, choice.columns)
        times[shape] = max(seconds, times[shape])
    return dict(times)


def _known(table: Table, dtype: torch.dtype, rows: int, columns: int) -> list[Choice]:
    """Return the entries for a shape, by batch size; none in torch's deterministic mode."""
    if torch.are_deterministic_algorithms_enabled():
        return []
    name = dtype_name(dtype)
    found = [c for c in table.values() if (c.dtype, c.rows, c.columns) == (name, rows, columns)]
    return sorted(found, key=lambda choice: choice.batch)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that a table has for a dtype."""
    return str(dtype).removeprefix("torch.")


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
            c.backend in BACKENDS and min(c.batch, c.steps, c.split, c.milliseconds) > 0
            for c in choices
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
    lines: list[tuple[str, ...]] = [
        ("dtype", "batch", "rows", "columns", "steps", "backend", "split", "ms")
    ]
    for _, choice in sorted(table.items()):
        *fields, milliseconds = asdict(choice).values()
        lines.append((*map(str, fields), f"{milliseconds:.3f}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
