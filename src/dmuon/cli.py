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
# Somebody waits for it, unlike in a training job.
_BUDGET_S = 3600.0


@main.callback()
def _root() -> None:
    """Keep `tune` a subcommand although it is the only one."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dmuon").setLevel(logging.INFO)


@main.command()
def tune(
    what: Annotated[
        list[str],
        typer.Argument(
            help="matrices, as 1024x4096 or 8x1024x4096; or module:function, which takes nothing "
            "and returns a dmuon.Muon, or a model for dmuon.param_groups"
        ),
    ],
    output: Annotated[Path, typer.Option(help="file of the table")] = Path("dmuon-tuning.json"),
    dtype: Annotated[str, typer.Option(help="for shapes: fp32, bf16 or fp16")] = "fp32",
    device: Annotated[str, typer.Option(help="for shapes: as torch names it")] = "cpu",
    coefficients: Annotated[str, typer.Option(help="for shapes: a named list")] = "original",
    steps: Annotated[int, typer.Option(help="for shapes: Newton-Schulz steps")] = 5,
) -> None:
    """Time every way to orthogonalize these matrices, keep the fastest, and print the choices.

    Pass the file that is written to `dmuon.Muon(tuning=...)`. Shapes are added to what it holds.
    """
    if len(what) == 1 and ":" in what[0]:
        timings, missing = _optimizer(what[0]).tune(output), ""
    else:
        kinds = _kinds(what, dtype, device, coefficients, steps)
        timings = _tune_shapes(kinds, torch.device(device), output)
        timed = {choice.key for choice in timings.choices}
        missing = ", ".join(str(kind) for kind in kinds if kind.key not in timed)
    typer.echo(format_timings(timings))
    if timings.choices:
        typer.echo(f"written to {output}")
    if missing:
        typer.echo(f"no backend is right on {device} for {missing}", err=True)
        raise typer.Exit(1)


def _tune_shapes(kinds: list[BatchKind], device: torch.device, output: Path) -> Timings:
    """Measure, and add what was found to the file."""
    try:
        # Before anything is timed.
        output.parent.mkdir(parents=True, exist_ok=True)
        before = load(output) if output.exists() else Timings()
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    timings = measure(kinds, device, budget_s=_BUDGET_S)
    if timings.choices:
        save(output, Timings((*before.choices, *timings.choices)))
    return timings


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
        raise typer.BadParameter(
            f"{text!r} is neither ROWSxCOLUMNS, BATCHxROWSxCOLUMNS nor module:function"
        )
    small, large = sorted(sizes[-2:])
    return (sizes[0] if len(sizes) == 3 else 1), (small, large)


def _optimizer(target: str) -> Muon:
    """Return the optimizer that `module:function` makes, or one of the model that it makes."""
    module, _, name = target.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise typer.BadParameter(f"{target}: {error}") from None
    if isinstance(made, torch.nn.Module):
        return Muon(param_groups(made))
    if not isinstance(made, Muon):
        raise typer.BadParameter(f"{target} returned {type(made).__name__}, not a Muon or a model")
    return made
