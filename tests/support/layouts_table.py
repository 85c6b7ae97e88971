"""Writes the table of docs/layouts.md from what the layout tests run.

    python -m tests.support.layouts_table

The property test compares each of its runs with the row that stands there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.layout_cases import CASES, LayoutCase, run_case
from tests.support.parity import Outcome
from tests.support.rank_pool import RankPool

DOCS = Path(__file__).parents[2] / "docs" / "layouts.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEADER = """\
| layout | ranks | matrices | orthogonalized, all ranks | bytes sent, all ranks | most by one rank |
|---|---:|---:|---:|---:|---:|"""


def table_row(case: LayoutCase, outcomes: Sequence[Outcome]) -> str:
    """One line of the table: what one step of a case did."""
    sent = [outcome.bytes_sent for outcome in outcomes]
    runs = sum(outcome.ns_matrices for outcome in outcomes)
    numbers = (case.world_size, outcomes[0].num_matrices, runs, sum(sent), max(sent))
    return f"| {case.name} | {' | '.join(f'{number:,}' for number in numbers)} |"


def main() -> None:
    rows = []
    for world_size in sorted({case.world_size for case in CASES}):
        pool = RankPool(world_size)
        for case in CASES:
            if case.world_size == world_size:
                rows.append(table_row(case, pool.run(run_case, case, timeout=60)))
        pool.close()
    before, rest = DOCS.read_text().split(BEGIN)
    after = rest.split(END)[1]
    DOCS.write_text(before + "\n".join([BEGIN, HEADER, *rows, END]) + after)


if __name__ == "__main__":
    main()
