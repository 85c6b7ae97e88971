"""How large the package may be: lines, lengths of functions, and decisions in them."""

import ast
from pathlib import Path
from statistics import median, quantiles

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "dmuon"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Where the package stands: it may only shrink without a reason.
MAX_LINES = 9400
MAX_OPTIMIZER_LINES = 250
# Lines of a function without its docstring.
MAX_MEDIAN, MAX_P90, MAX_LONGEST = 8, 25, 60
MAX_COMPLEXITY = 10
LINES_PER_COMPLEX_FUNCTION = 1000

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Each of these is a decision, and so is every part of `a and b`, every case of a `match`, and every
# `for` and `if` of a comprehension. An `assert` is not.
DECISIONS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)


def complexity(function: Function) -> int:
    """Return one more than the number of decisions in a function, nested functions included."""
    total = 1
    for node in ast.walk(function):
        if isinstance(node, DECISIONS):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
    return total


def num_lines(function: Function) -> int:
    """Return the lines of a function from its `def` on, without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions() -> dict[str, Function]:
    """Return every function of the package by file, line and name."""
    return {
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}": node
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, Function)
    }


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a", 1),
        ("assert a and b", 2),
        ("if a: pass\n elif b: pass\n else: pass", 3),
        ("for i in a: pass\n while b: pass", 3),
        ("try: a()\n except E: pass\n finally: b()", 2),
        ("return a or b and c", 3),
        ("return a if b else c", 2),
        ("return [i for i in a if i if i > 1]", 4),
        ("return {i: j for i in a for j in i}", 3),
        ("match a:\n  case 1: pass\n  case _: pass", 3),
        ("return sum(i for i in a)", 2),
        ("def g():\n  if a: pass", 2),
    ],
)
def test_decisions_are_counted(body, expected):
    assert complexity(ast.parse(f"def f():\n {body}").body[0]) == expected


def test_lines_are_counted_without_the_docstring():
    function = ast.parse('@d\ndef f(\n    a,\n):\n    """One.\n\n    Two.\n    """\n    return a')
    assert num_lines(function.body[0]) == 4


def test_package_is_small():
    assert sum(map(line_count, SOURCES)) <= MAX_LINES


def test_optimizer_is_small():
    assert line_count(PACKAGE / "optimizer.py") <= MAX_OPTIMIZER_LINES


def test_functions_are_short():
    lines = {name: num_lines(function) for name, function in functions().items()}
    assert median(lines.values()) <= MAX_MEDIAN
    assert quantiles(lines.values(), n=10, method="inclusive")[-1] <= MAX_P90
    assert {name: num for name, num in lines.items() if num > MAX_LONGEST} == {}


def test_few_functions_decide_much():
    found = {name: complexity(function) for name, function in functions().items()}
    complex_ones = {name: num for name, num in found.items() if num > MAX_COMPLEXITY}
    allowed = sum(map(line_count, SOURCES)) // LINES_PER_COMPLEX_FUNCTION
    assert len(complex_ones) <= allowed, complex_ones
