"""The `dmuon` command; needs the extra `cli`."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import torch

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(
        f"the dmuon command needs {error.name}; in a checkout: pip install '.[cli]'"
    ) from None

from dmuon.newton_schulz import Method, resolve_coefficients
from dmuon.newton_schulz.method import check_precision
from dmuon.optimizer import Muon
from dmuon.plan.cost import Timings
from dmuon.routing.rules import param_groups
from dmuon.tuning.measure import BatchKind, measure
from dmuon.tuning.table import format_timings, load, save

main = typer.Typer(help="Distributed Muon for PyTorch.", no_args_is_help=True)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WHAT = "1024x4096, 8x1024x4096 (a batch), or module:function that returns a Muon or a model"


@main.callback()
def _root() -> None:
    """Keep `tune` a subcommand although it is the only one."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dmuon").setLevel(logging.INFO)


@main.command()
def tune(
    what: Annotated[list[str], typer.Argument(help=_WHAT)],
    output: Annotated[Path, typer.Option(help="file of the table")] = Path("dmuon-tuning.json"),
    dtype: Annotated[str, typer.Option(help="of shapes: fp32, bf16 or fp16")] = "fp32",
    device: Annotated[str, typer.Option(help="of shapes: as torch names it")] = "cpu",
    coefficients: Annotated[str, typer.Option(help="of shapes: a named list")] = "original",
    steps: Annotated[int, typer.Option(help="of shapes: Newton-Schulz steps")] = 5,
) -> None:
    """Time every way to orthogonalize these matrices, keep the fastest, and print the choices.

    Pass the file that is written to `dmuon.Muon(tuning=...)`. Shapes are added to what it holds.
    """
    if ":" in what[0]:
        timings, missing = _optimizer(what).tune(output), ""
    else:
        kinds = _kinds(what, dtype, device, coefficients, steps)
        timings = _tune_shapes(kinds, torch.device(device), output)
        timed = {choice.key for choice in timings.choices}
        missing = ", ".join(str(kind) for kind in kinds if kind.key not in timed)
    if timings.choices:
        typer.echo(f"{format_timings(timings)}\nwritten to {output}")
    if missing:
        typer.echo(f"no backend is right on {device} for {missing}", err=True)
        raise typer.Exit(1)


def _optimizer(what: list[str]) -> Muon:
    """Return the optimizer that `module:function` makes, or one of the model that it makes."""
    module, _, name = what[0].partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        (_,) = what
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise typer.BadParameter(f"{' '.join(what)}: {error}") from None
    if isinstance(made, torch.nn.Module):
        return Muon(param_groups(made))
    if not isinstance(made, Muon):
        raise typer.BadParameter(f"{what[0]} returned {type(made).__name__}, no Muon and no model")
    return made


def _kinds(
    shapes: list[str], dtype: str, device: str, coefficients: str, steps: int
) -> list[BatchKind]:
    """Return what is to be timed, or say which argument is wrong."""
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"dtype {dtype!r} is unknown; use {', '.join(_DTYPES)}")
    try:
        torch.empty(0, device=device)
        method = Method(resolve_coefficients(coefficients, steps), 1e-7, _DTYPES[dtype])
        check_precision(method.coefficients, method.dtype)
    except (ValueError, RuntimeError, AssertionError, ImportError) as error:
        raise typer.BadParameter(str(error).splitlines()[0]) from None
    return [BatchKind(method, *_parse_shape(shape)) for shape in shapes]


def _parse_shape(text: str) -> tuple[int, tuple[int, int]]:
    parts = text.split("x")
    sizes = [int(part) if part.isdecimal() and len(part) < 10 else 0 for part in parts]
    if len(sizes) not in {2, 3} or min(sizes) < 1:
        raise typer.BadParameter(f"{text!r} is none of {_WHAT}")
    small, large = sorted(sizes[-2:])
    return (sizes[0] if len(sizes) == 3 else 1), (small, large)


def _tune_shapes(kinds: list[BatchKind], device: torch.device, output: Path) -> Timings:
    """Measure, however long it takes, and add what was found to the file."""
    try:
        # Before anything is timed.
        output.parent.mkdir(parents=True, exist_ok=True)
        before = load(output) if output.exists() else Timings()
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    timings = measure(kinds, device, budget_s=float("inf"))
    if timings.choices:
        save(output, Timings((*before.choices, *timings.choices)))
    return timings
