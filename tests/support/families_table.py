"""Writes the table of docs/routing.md from the model families that the routing tests judge.

python -m tests.support.families_table
"""

from __future__ import annotations

from pathlib import Path

from tests.support.model_families import FAMILIES, Family

DOCS = Path(__file__).parents[2] / "docs" / "routing.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEADER = "| family | to AdamW, by rule | the literature's choice |\n|---|---|---|"


def table_row(family: Family) -> str:
    """One line of the table: what of a family does not go to Muon."""
    kinds = "; ".join(
        f"**{rule}** {', '.join(f'`{name}`' for name in names)}"
        for rule, names in family.kinds.items()
    )
    return f"| {family.name} | {kinds} | {family.advice} |"


def format_table() -> str:
    """The whole table, with the marks around it."""
    return "\n".join([BEGIN, HEADER, *map(table_row, FAMILIES), END])


def main() -> None:
    before, rest = DOCS.read_text().split(BEGIN)
    DOCS.write_text(before + format_table() + rest.split(END)[1])


if __name__ == "__main__":
    main()
