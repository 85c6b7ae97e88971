"""What the optimizer does with every parameter, as a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One parameter.

    Attributes:
        parameter: Fully qualified name.
        shape: Logical shape.
        layout: Mesh and placements, or "plain".
        algorithm: What optimizes it, such as "muon" or "adamw".
        rule: Why it is routed so.
        matrices: How many matrices of which shape; empty for AdamW.
        owners: Ranks that orthogonalize them, each with how many.
        lr_scale: Factor on the group's learning rate, per matrix shape; 1 for AdamW.
    """

    parameter: str
    shape: str
    layout: str
    algorithm: str
    rule: str
    matrices: str
    owners: str
    lr_scale: str


@dataclass(frozen=True, slots=True)
class Report:
    """Rows, and totals for the whole job; `str()` gives a table.

    Attributes:
        rows: One per parameter.
        num_matrices: Matrices of the parameters that this rank stores any part of.
        num_orthogonalized: Matrices that each rank orthogonalizes per step.
        loads: Share of the orthogonalization cost that each rank carries.
        bytes_sent: Bytes that each rank sends per step.
    """

    rows: tuple[ReportRow, ...]
    num_matrices: int
    num_orthogonalized: dict[int, int]
    loads: dict[int, float]
    bytes_sent: dict[int, int]

    def __str__(self) -> str:
        header = tuple(field.name.replace("_", " ") for field in fields(ReportRow))
        lines = _table([header, *(astuple(row) for row in self.rows)])
        runs = sum(self.num_orthogonalized.values())
        lines.append(f"{self.num_matrices} matrices, orthogonalized {runs} times per step")
        for rank, share in self.loads.items():
            count, sent = self.num_orthogonalized[rank], self.bytes_sent[rank]
            lines.append(
                f"rank {rank}: {count} matrices, {share:.1%} of the cost, "
                f"sends {sent:,} bytes per step"
            )
        return "\n".join(lines)


def build_report(
    plan: Plan, named_params: Iterable[tuple[str, Tensor, Mapping[str, Any]]]
) -> Report:
    """Describe named parameters with their groups under a plan."""
    owners: dict[str, Counter[int]] = defaultdict(Counter)
    shapes: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    scales: dict[str, dict[float, None]] = defaultdict(dict)
    for a in plan.assignments:
        matrix = a.request.matrix
        owners[matrix.fqn].update(a.owners)
        shapes[matrix.fqn][matrix.shape] += 1
        scales[matrix.fqn][a.request.scale] = None
    rows = [
        _row(fqn, param, group, shapes[fqn], owners[fqn], scales[fqn])
        for fqn, param, group in named_params
    ]
    loads, sent = plan.loads(), plan.bytes_sent()
    total = sum(loads.values()) or 1.0
    return Report(
        tuple(rows),
        len(plan.assignments),
        {rank: plan.num_orthogonalized(rank) for rank in sorted(loads)},
        {rank: loads[rank] / total for rank in sorted(loads)},
        {rank: sent[rank] for rank in sorted(sent)},
    )


def _row(
    fqn: str,
    param: Tensor,
    group: Mapping[str, Any],
    shapes: Counter[tuple[int, int]],
    owners: Counter[int],
    scales: Iterable[float],
) -> ReportRow:
    return ReportRow(
        parameter=fqn,
        shape=_by(param.shape),
        layout=_layout(param),
        algorithm=group["algorithm"],
        rule=group["rule"],
        matrices=", ".join(f"{count} of {_by(shape)}" for shape, count in shapes.items()),
        owners=", ".join(f"{rank} ({count})" for rank, count in sorted(owners.items())),
        lr_scale=", ".join(f"{scale:.4g}" for scale in scales) or "1",
    )


def _layout(param: Tensor) -> str:
    if not isinstance(param, DTensor):
        return "plain"
    return f"({', '.join(map(str, param.placements))}) on {_by(param.device_mesh.shape)}"


def _by(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
