"""Import a wheel of dmuon, and take a step, with nothing but torch and what torch requires.

    python .ci/try_wheel.py build/wheel/dmuon-0.1.0-py3-none-any.whl

Makes an empty virtual environment, installs the wheel into it, and links torch and its requirements
into it one by one from the environment that runs this script, which saves a second download.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

PROGRAM = """
import importlib.util
import sys
from importlib.metadata import version

import torch

import dmuon

for module in ("numpy", "pytest", "rich", "tests", "typer"):
    assert importlib.util.find_spec(module) is None, f"{module} is here too"
assert dmuon.__file__.startswith(sys.prefix), dmuon.__file__
assert version("dmuon") == dmuon.__version__
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
optimizer = dmuon.Muon(dmuon.param_groups(model))
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(f"dmuon {dmuon.__version__} takes a step with torch {torch.__version__} alone")
"""


def with_requirements(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Add a distribution and all that it requires, without extras, to `found`."""
    dist = distribution(name)
    if dist.name not in found:
        found[dist.name] = dist
        for requirement in map(Requirement, dist.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                with_requirements(requirement.name, found)
    return found


def top_level(dist: Distribution) -> set[Path]:
    """Return the files and folders of a distribution that lie in site-packages itself."""
    root = Path(dist.locate_file(""))
    names = {file.parts[0] for file in dist.files or ()} - {"..", "__pycache__"}
    return {root / name for name in names}


def main() -> None:
    """Try the wheel that is named on the command line."""
    (wheel,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, symlinks=True)
        python = Path(folder, "bin", "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
        (packages,) = Path(folder).glob("lib/python*/site-packages")
        for dist in with_requirements("torch", {}).values():
            for path in top_level(dist):
                (packages / path.name).symlink_to(path)
        # Without numpy, which torch does not require, it warns that it cannot convert to numpy.
        command = [python, "-I", "-W", "error", "-W", "ignore:Failed to init", "-c", PROGRAM]
        subprocess.run(command, check=True, cwd=folder)


if __name__ == "__main__":
    main()
