"""What the documentation must list."""

import re
from pathlib import Path

import pytest

import dmuon
from dmuon.algorithms import ALGORITHMS

DOCS = Path(__file__).parents[1] / "docs"
SECTIONS = {"muon": "Muon", "normuon": "NorMuon", "adamw": "AdamW"}


def test_the_reference_lists_every_public_name():
    page = (DOCS / "reference.md").read_text()
    assert set(dmuon.__all__) <= set(re.findall(r"^::: dmuon\.(\w+)$", page, re.MULTILINE))


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda algorithm: algorithm.name)
def test_every_algorithm_has_its_row_its_section_and_its_defaults(algorithm):
    page, variants = (DOCS / "algorithms.md").read_text(), (DOCS / "variants.md").read_text()
    (row,) = re.findall(rf"^\| `{algorithm.name}` \|.*$", variants, re.MULTILINE)
    assert {f"`{key}`" for key in algorithm.state} <= set(re.findall(r"`\w+`", row))
    assert all(f"`{key}={value}`" in row for key, value in algorithm.options.items())
    if algorithm.name in SECTIONS:
        assert f"\n## {SECTIONS[algorithm.name]}\n" in page
        assert f'| `"{algorithm.name}"` |' in page


def test_the_package_on_the_design_page_has_every_file():
    package = DOCS.parent / "src" / "dmuon"
    tree = (DOCS / "design.md").read_text().partition("src/dmuon/\n")[2].partition("```")[0]
    found = {path.name for path in package.rglob("*.py")}
    assert set(re.findall(r"\w+\.py", tree)) == found
