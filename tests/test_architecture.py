"""What the import contracts in pyproject.toml cannot express."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "dmuon"
SOURCES = sorted(PACKAGE.rglob("*.py"))

MAY_COMMUNICATE = {"clip.py", "agreement.py", "exchange.py", "reduce.py"}
# Prefixes: `all_` covers `all_gather_object` and `all_to_all_single`.
COLLECTIVES = ("all_", "barrier", "batch_isend_irecv", "broadcast", "gather", "irecv", "isend")
COLLECTIVES += ("monitored_barrier", "recv", "reduce", "scatter", "send")
# Methods of DTensor that run a collective inside.
HIDDEN_COLLECTIVES = {"distribute_tensor", "full_tensor", "redistribute"}


def imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (name in this file, full name) for every import in the file, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def collectives_used(tree: ast.Module) -> set[str]:
    """Return the full names of the functions that `tree` uses and that talk to other ranks."""
    full_names = dict(imported_names(tree))
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            base, _, rest = ast.unparse(node).partition(".")
            full_name = f"{full_names.get(base, base)}.{rest}".rstrip(".")
            function = full_name.rsplit(".", 1)[-1]
            is_collective = "distributed" in full_name and function.startswith(COLLECTIVES)
            if is_collective or function in HIDDEN_COLLECTIVES:
                used.add(full_name)
    return used


@pytest.mark.parametrize(
    ("code", "used"),
    [
        ("import torch.distributed as dist\ndist.all_reduce(x)", {"torch.distributed.all_reduce"}),
        ("import torch\ntorch.distributed.send(x, 0)", {"torch.distributed.send"}),
        ("from torch.distributed import broadcast as b\nb(x)", {"torch.distributed.broadcast"}),
        ("def f(p):\n    return p.full_tensor()", {"p.full_tensor"}),
        ("import torch.distributed as dist\ndist.get_rank()", set()),
        ("import torch\ntorch.gather(x, 0, i)", set()),
    ],
)
def test_collectives_are_recognised(code, used):
    assert collectives_used(ast.parse(code)) == used


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_exchange_and_clipping_talk_to_other_ranks(path):
    if path.name not in MAY_COMMUNICATE:
        assert collectives_used(ast.parse(path.read_text())) == set()


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "newton_schulz").rglob("*.py")), ids=lambda p: p.name
)
def test_orthogonalize_knows_nothing_of_ranks(path):
    names = [full_name for _, full_name in imported_names(ast.parse(path.read_text()))]
    assert not [name for name in names if name.startswith("torch.distributed")]
