"""The package runs without any trainer installed."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "dmuon"
TRAINERS = {"accelerate", "lightning", "torchtitan", "transformers"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_only_its_own_adapter_imports_a_trainer(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) if node.module}
    allowed = {path.stem} if path.parent.name == "integrations" else set()
    assert not {name.split(".")[0] for name in names} & (TRAINERS - allowed)
    # The package itself exports `adopt_state`, which knows no trainer.
    public = {"dmuon.integrations.adoption"} if path == PACKAGE / "__init__.py" else set()
    if path.parent.name != "integrations":
        assert not [name for name in names - public if name.startswith("dmuon.integrations")]
