"""Measured choices by shape, kept on disk per device: what `autotune` writes and others follow.

A table is data: it names a backend for each shape, and its times can stand in for FLOPs in a cost
model. Nothing is looked up behind a caller's back, so two ranks cannot come to choose differently.
In torch's deterministic mode a table answers as if it were empty.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from dmuon.newton_schulz.backends import BACKENDS

CACHE_VERSION = 2
LARGEST_SIZE = 2**31 - 1

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest correct way to orthogonalize a batch of one shape.

    Attributes:
        dtype: In which to iterate, as torch names it.
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
    def key(self) -> tuple[str, int, int, int, int]:
        """What the choice is for."""
        return (self.dtype, self.batch, self.rows, self.columns, self.steps)

    @property
    def seconds(self) -> float:
        """Of one step of the whole batch."""
        return self.milliseconds / self.steps / 1e3


class Table:
    """Choices for any number of shapes, dtypes, batch sizes and numbers of steps.

    Attributes:
        choices: All of them, ordered by what they are for.
        digest: Short hash of them, by which ranks compare their tables.
    """

    def __init__(self, choices: Iterable[Choice] = ()) -> None:
        """Keep the last of several choices for the same."""
        by_key = {choice.key: choice for choice in choices}
        self.choices = [by_key[key] for key in sorted(by_key)]
        self.digest = hashlib.sha256(repr(self.choices).encode()).hexdigest()[:8]
        self._by_shape: dict[tuple[str, Shape], list[Choice]] = {}
        for choice in self.choices:
            key = (choice.dtype, (choice.rows, choice.columns))
            self._by_shape.setdefault(key, []).append(choice)

    def find(self, dtype: torch.dtype, steps: int, batch: int, shape: Shape) -> Choice | None:
        """Return the entry for a shape with the nearest number of steps and batch, or None."""
        known = self._known(dtype, steps, shape)
        return min(
            known, key=lambda choice: (abs(choice.batch - batch), choice.batch), default=None
        )

    def seconds(self, dtype: torch.dtype, steps: int, batch: int, shape: Shape) -> float | None:
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
        """Return the measured seconds of a step on one matrix, for a cost model.

        By dtype and shape; of several batch sizes the smallest counts.
        """
        if torch.are_deterministic_algorithms_enabled():
            return {}
        smallest = {key: choices[0] for key, choices in self._by_shape.items()}
        return {key: choice.seconds / choice.batch for key, choice in smallest.items()}

    def _known(self, dtype: torch.dtype, steps: int, shape: Shape) -> list[Choice]:
        """Return the entries of the nearest number of steps."""
        if torch.are_deterministic_algorithms_enabled():
            return []
        known = self._by_shape.get((dtype_name(dtype), shape), [])
        nearest = min((c.steps for c in known), key=lambda s: (abs(s - steps), s), default=0)
        return [choice for choice in known if choice.steps == nearest]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that a table has for a dtype."""
    return str(dtype).removeprefix("torch.")


def cache_path(folder: Path, device: torch.device) -> Path:
    """Return the file in `folder` that holds the table of `device`."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        name = f"{device.type} {platform.machine()} {capability} {torch.get_num_threads()} threads"
    return folder / ("".join(c if c.isalnum() else "_" for c in name) + ".json")


def load(path: Path) -> Table:
    """Return the choices in `path` that can be read; none if there is no such file."""
    try:
        content = json.loads(path.read_text())
        rows = content["choices"] if content["version"] == CACHE_VERSION else []
        choices = [_read(row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return Table()
    return Table(choice for choice in choices if choice is not None)


def _read(row: object) -> Choice | None:
    """Return one row of a file, or None if it is none."""
    types = {field.name: field.type for field in fields(Choice)}
    if not isinstance(row, dict) or row.keys() != types.keys():
        return None
    if type(row["milliseconds"]) is int and row["milliseconds"] <= LARGEST_SIZE:
        row = {**row, "milliseconds": float(row["milliseconds"])}
    if any(type(value) is not types[name] for name, value in row.items()):
        return None
    choice = Choice(**row)
    sizes = (choice.batch, choice.rows, choice.columns, choice.steps, choice.split)
    usable = (
        choice.backend in BACKENDS
        and 0 < min(sizes) <= max(sizes) <= LARGEST_SIZE
        and choice.rows <= choice.columns
        and 0 < choice.milliseconds < math.inf
    )
    return choice if usable else None


def load_strict(path: str | os.PathLike[str]) -> Table:
    """Return the table in `path`, which the caller relies on.

    Raises:
        ValueError: There is no table that can be read.
    """
    table = load(Path(path))
    if not table.choices:
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
    merged = Table([*load(path).choices, *table.choices])
    content = {"version": CACHE_VERSION, "choices": [asdict(choice) for choice in merged.choices]}
    draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        draft.write_text(json.dumps(content, indent=1))
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def format_table(table: Table) -> str:
    """Return the choices as aligned text, one a line."""
    lines: list[tuple[str, ...]] = [
        ("dtype", "batch", "rows", "columns", "steps", "backend", "split", "ms")
    ]
    for choice in table.choices:
        *cells, milliseconds = asdict(choice).values()
        lines.append((*map(str, cells), f"{milliseconds:.3f}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
