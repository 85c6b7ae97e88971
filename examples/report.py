"""What a run measured: the records, the progress line, the table and the picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

LABELS = {"adamw": "AdamW", "vanilla": "all-gather Muon", "dmuon": "dmuon"}
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Step:
    """One step on one rank; the loss is the mean over ranks."""

    loss: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    bytes_sent: int
    ns_matrices: int


@dataclass(frozen=True)
class Run:
    """One run over all ranks.

    Times are medians over steps of the mean over ranks. `bytes_sent` is the most that a rank sent
    for the optimizer in one step; `ns_matrices` is how many matrices all ranks together
    orthogonalized in one step.
    """

    name: str
    losses: list[float]
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    bytes_sent: int
    ns_matrices: int

    @classmethod
    def gather(cls, name: str, steps: Sequence[Step]) -> Run:
        """Join the steps of all ranks. Collective."""
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, list(steps))

        def typical(phase: str) -> float:
            return median(
                fmean(getattr(step, phase) for step in ranks)
                for ranks in zip(*by_rank, strict=True)
            )

        return cls(
            name=name,
            losses=[step.loss for step in steps],
            forward_ms=typical("forward_ms"),
            backward_ms=typical("backward_ms"),
            optimizer_ms=typical("optimizer_ms"),
            bytes_sent=max(ranks[-1].bytes_sent for ranks in by_rank),
            ns_matrices=sum(ranks[-1].ns_matrices for ranks in by_rank),
        )

    @property
    def final_loss(self) -> float:
        """The mean over the last ten steps: one batch alone is noisy."""
        return fmean(self.losses[-10:])

    def row(self) -> tuple[str, ...]:
        """Return the cells of the table, in the order of `COLUMNS`."""
        phases = [getattr(self, f"{phase}_ms") for phase in PHASES]
        times = [f"{time_ms:.0f}" for time_ms in (*phases, sum(phases))]
        return (
            LABELS[self.name],
            f"{self.final_loss:.3f}",
            *times,
            f"{self.bytes_sent / 1e6:.2f}",
            str(self.ns_matrices),
        )


COLUMNS = (
    "optimizer",
    "final\nloss",
    "forward\nms",
    "backward\nms",
    "optimizer\nms",
    "step\nms",
    "MB sent\nper rank",
    "NS matrices\nall ranks",
)


def track(
    turns: Iterable[tuple[Step, ...]], names: Sequence[str], num_steps: int
) -> Iterator[tuple[Step, ...]]:
    """Pass the steps through, showing progress and losses on rank 0."""
    columns = (
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, TimeRemainingColumn(), disable=dist.get_rank() != 0) as progress:
        task = progress.add_task("", total=num_steps)
        for turn in turns:
            losses = "  ".join(
                f"{LABELS[name]} {step.loss:.3f}" for name, step in zip(names, turn, strict=True)
            )
            progress.update(task, advance=1, description=f"loss: {losses}")
            yield turn


def print_table(runs: Iterable[Run]) -> None:
    """Print one row per run; times, bytes and matrices are those of one step."""
    table = Table(title="One step; bytes and NS (Newton-Schulz) are the optimizer's")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "optimizer" else "right")
    for run in runs:
        table.add_row(*run.row())
    # Piped into a file, the console would take 80 columns, too few for the table.
    Console(width=max(Console().width, 100)).print(table)


def save(runs: Iterable[Run], folder: Path, config: dict[str, Any]) -> None:
    """Write `demo.json`, `demo.md` (the table) and `demo.png` into `folder`."""
    runs = list(runs)
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "config": config,
        "torch": torch.__version__,
        "runs": [asdict(run) | {"final_loss": run.final_loss} for run in runs],
    }
    (folder / "demo.json").write_text(json.dumps(record, indent=2) + "\n")
    heading = tuple(column.replace("\n", " ") for column in COLUMNS)
    lines = [heading, ("---", *["---:"] * (len(COLUMNS) - 1)), *(run.row() for run in runs)]
    (folder / "demo.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    draw(runs, folder / "demo.png")


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw loss curves, and a bar of forward, backward and optimizer time for each run."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curves, bars) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    looks = {
        "adamw": {"color": "#7f8c8d", "linewidth": 1.5},
        "vanilla": {"color": "#e67e22", "linewidth": 4, "alpha": 0.5},
        "dmuon": {"color": "#1f4e9c", "linewidth": 1.5},
    }
    for run in runs:
        curves.plot(
            range(1, len(run.losses) + 1), run.losses, label=LABELS[run.name], **looks[run.name]
        )
    curves.set(xlabel="step", ylabel="loss (nats per byte)", title="Loss, same weights and batches")
    curves.legend(frameon=False)

    labels, left = [LABELS[run.name] for run in runs], [0.0] * len(runs)
    for phase, color in zip(PHASES, ("#cfd8dc", "#90a4ae", "#c0392b"), strict=True):
        widths = [getattr(run, f"{phase}_ms") for run in runs]
        drawn = bars.barh(labels, widths, left=left, color=color, label=phase)
        # The last bar's label stands outside: AdamW's bar is too short to hold it.
        place = {"label_type": "center"} if phase != PHASES[-1] else {"color": color, "padding": 4}
        bars.bar_label(drawn, fmt="%.0f", **place)
        left = [total + width for total, width in zip(left, widths, strict=True)]
    bars.invert_yaxis()
    bars.margins(x=0.1)
    bars.set(xlabel="milliseconds", title="Time of one step, median")
    bars.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
