"""The `dmuon` command; needs the extra `cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(
        f"the dmuon command needs {error.name}; in a checkout: pip install '.[cli]'"
    ) from None

from dmuon.newton_schulz import resolve_coefficients
from dmuon.tuning.autotune import tune as tune_shapes
from dmuon.tuning.table import cache_path, format_table, load, save

main = typer.Typer(help="Distributed Muon for PyTorch.", no_args_is_help=True)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@main.callback()
def _root() -> None:
    """Keep `tune` a subcommand although it is the only one."""


@main.command()
def tune(
    shapes: Annotated[list[str], typer.Argument(help="matrices, as 1024x4096 or 8x1024x4096")],
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16")] = "fp32",
    device: Annotated[str, typer.Option(help="as torch names it")] = "cpu",
    coefficients: Annotated[str, typer.Option(help="a named list")] = "original",
    steps: Annotated[int, typer.Option(help="Newton-Schulz steps")] = 5,
    cache: Annotated[Path, typer.Option(help="folder of the tables")] = Path("dmuon-tuning"),
) -> None:
    """Time every way to orthogonalize these matrices, keep the fastest, and print the choices.

    Pass the file that is written to `dmuon.Muon(tuning=...)`.
    """
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"dtype {dtype!r} is unknown; use {', '.join(_DTYPES)}")
    batches = [_parse_shape(shape) for shape in shapes]
    try:
        triples = resolve_coefficients(coefficients, steps)
        where = torch.empty(0, device=device).device
        # Before anything is timed.
        cache.mkdir(parents=True, exist_ok=True)
    except (ValueError, RuntimeError, AssertionError, ImportError, OSError) as error:
        raise typer.BadParameter(str(error).splitlines()[0]) from None
    table = tune_shapes(batches, coefficients=triples, dtype=_DTYPES[dtype], device=where)
    if table.choices:
        path = cache_path(cache, where)
        save(path, table)
        typer.echo(format_table(load(path)))
        typer.echo(f"written to {path}")
    timed = {(choice.batch, choice.rows, choice.columns) for choice in table.choices}
    left_out = [
        shape
        for shape, (batch, *sides) in zip(shapes, batches, strict=True)
        if (batch, *sorted(sides)) not in timed
    ]
    if left_out:
        typer.echo(f"no backend is right in {dtype} on {where} for {', '.join(left_out)}", err=True)
        raise typer.Exit(1)


def _parse_shape(text: str) -> tuple[int, int, int]:
    parts = text.split("x")
    sizes = [int(part) if part.isdecimal() and len(part) < 10 else 0 for part in parts]
    if len(sizes) not in {2, 3} or min(sizes) < 1:
        raise typer.BadParameter(f"shape {text!r} is not ROWSxCOLUMNS or BATCHxROWSxCOLUMNS")
    batch, rows, columns = sizes if len(sizes) == 3 else (1, *sizes)
    return batch, rows, columns
