"""Measured choices as a file: to `Timings` and back."""

import json
import os
import platform
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import torch

from dmuon.newton_schulz.backend import Backend
from dmuon.plan.cost import Choice, Timings

VERSION = 3


def load(path: str | os.PathLike[str]) -> Timings:
    """Return the choices in a file that `save` wrote.

    Raises:
        ValueError: There is none that can be read.
    """
    try:
        content = json.loads(Path(path).read_text())
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}, not {VERSION}")
        rows = [row | {"backend": Backend.parse(row["backend"])} for row in content["choices"]]
        return Timings(tuple(Choice(**row) for row in rows))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"tuning {os.fspath(path)!r}: no table can be read there ({error!r:.200}); write one "
            "with `dmuon tune`"
        ) from None


def save(path: str | os.PathLike[str], timings: Timings) -> None:
    """Write choices to a file, which is replaced in one operation: a reader sees old or new."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(choice) | {"backend": str(choice.backend)} for choice in timings.choices]
    draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        draft.write_text(json.dumps({"version": VERSION, "choices": rows}, indent=1))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def default_path(device: torch.device) -> Path:
    """Return the file that holds what was measured on a device with this torch and dmuon.

    In the folder of the environment variable `DMUON_CACHE_DIR`, or `~/.cache/dmuon`.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        name = f"{device.type} {platform.machine()} {capability} {torch.get_num_threads()} threads"
    # Not imported: the package lies on top of its rooms.
    version = vars(sys.modules["dmuon"])["__version__"]
    name = f"{name} torch {torch.__version__} dmuon {version}"
    folder = Path(os.environ.get("DMUON_CACHE_DIR") or Path.home() / ".cache" / "dmuon")
    return folder / ("".join(c if c.isalnum() or c == "." else "_" for c in name) + ".json")


def format_timings(timings: Timings) -> str:
    """Return the choices as aligned text, one a line."""
    row = "{:<8} {:>6} {:>6} {:>8} {:>6}  {:<20} {:>5} {:>10}".format
    lines = [row("dtype", "batch", "rows", "columns", "steps", "backend", "parts", "ms")]
    for choice in timings.choices:
        how = (str(choice.backend), choice.parts, f"{choice.milliseconds:.3f}")
        lines.append(row(*choice.key, *how))
    return "\n".join(lines)
