"""Writes the table of docs/variants.md from the algorithms themselves.

python -m tests.support.variants_table
"""

from __future__ import annotations

from pathlib import Path

from dmuon.algorithms import ALGORITHMS, Algorithm, StateKind

DOCS = Path(__file__).parents[2] / "docs" / "variants.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEADER = """\
| name | state of an `M x N` matrix | options | more than Muon sends |
|---|---|---|---|"""
SIZES = {
    StateKind.ELEMENTS: "`M x N`",
    StateKind.UPDATES: "`M x N`",
    StateKind.ROWS: "`M`",
    StateKind.COLS: "`N`",
    StateKind.COUNT: "1",
}


def table_row(algorithm: Algorithm) -> str:
    """One line of the table."""
    state = ", ".join(f"`{key}` {SIZES[kind]}" for key, kind in algorithm.state.items())
    options = ", ".join(f"`{key}={value}`" for key, value in algorithm.options.items()) or "-"
    lines = algorithm.keys(StateKind.ROWS, StateKind.COLS)
    sums = algorithm.matrices.sums if algorithm.matrices else ()
    extra = [f"`{key}`, both ways" for key in lines]
    if sums:
        numbers = "number" if len(sums) == 1 else "numbers"
        extra.append(f"{len(sums)} {numbers} a matrix, added up by one collective a bucket")
    sent = "; ".join(extra) or ("nothing" if algorithm.matrices else "it sends nothing")
    return f"| `{algorithm.name}` | {state} | {options} | {sent} |"


def rows() -> list[str]:
    """The table."""
    return [table_row(algorithm) for algorithm in ALGORITHMS.values()]


def main() -> None:
    before, rest = DOCS.read_text().split(BEGIN)
    after = rest.split(END)[1]
    DOCS.write_text(before + "\n".join([BEGIN, HEADER, *rows(), END]) + after)


if __name__ == "__main__":
    main()
