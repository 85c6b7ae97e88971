"""The list of public reports and the tests that hold them agree."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
SOURCES = [path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__)]
ROWS = re.findall(
    r"^\| (R\d\d) \|.*\| `(\w+)` \|$",
    (TESTS / "public_reports.md").read_text(),
    flags=re.MULTILINE,
)


def reports_in(source: str) -> set[str]:
    """Return the numbers of reports in names and comments: `test_r16_...`, `# R16: ...`."""
    numbers = re.findall(r"(?<![A-Za-z0-9])[Rr](\d\d)(?![A-Za-z0-9])", source)
    return {f"R{number}" for number in numbers}


def test_every_report_in_the_tests_is_listed_once_and_the_other_way_round():
    listed = [report for report, _ in ROWS]
    assert listed == sorted(set(listed))
    assert set(listed) == set().union(*map(reports_in, SOURCES))


def test_every_test_in_the_list_exists():
    functions = {
        node.name
        for source in SOURCES
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }
    assert {test for _, test in ROWS} <= functions


def test_a_row_names_a_test_of_its_own_report():
    for report, test in ROWS:
        assert reports_in(test) <= {report}, test
