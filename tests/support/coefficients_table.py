"""Tables of docs/orthogonalize.md: named lists, and the singular values that every backend gives.

    python -m tests.support.coefficients_table

writes both into the page. Kernels that need a GPU are emulated: products accumulated in double,
rounded once, their lower triangle mirrored.
"""

import re
from functools import cache
from pathlib import Path
from unittest import mock

import torch

from dmuon.newton_schulz import Method, orthogonalize_stack, polar, products, resolve_coefficients
from dmuon.newton_schulz.backend import BACKENDS
from dmuon.newton_schulz.choice import _NEEDS
from dmuon.newton_schulz.coefficients import REGISTRY
from dmuon.newton_schulz.method import DTYPES, check_precision, dtype_name
from dmuon.newton_schulz.polynomial import evaluate
from dmuon.newton_schulz.restarts import safe_restarts
from tests.support.reference import with_spectrum

PAGE = Path(__file__).parents[2] / "docs" / "orthogonalize.md"
SHAPES = ((8, 8), (16, 40))
SEEDS = 4


def output_range(name, lower):
    """Return where a list takes singular values in `[lower, 1]`: least and greatest."""
    coefficients = resolve_coefficients(name)
    values = [evaluate(lower ** (i / 3000), coefficients) for i in range(3001)]
    return (min(values), max(values))


def format_restarts(name, dtype):
    coefficients = resolve_coefficients(name)
    try:
        check_precision(coefficients, dtype)
    except ValueError:
        return "list refused"
    restarts = safe_restarts(coefficients, dtype)
    return "refused" if restarts is None else ", ".join(map(str, restarts))


def format_registry():
    """Return the lists, where they take singular values, and their restarts, in Markdown."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    ranges = (f"sigma >= {low} lands in" for low in (0.01, 0.001))
    restarts = (f"restarts, {dtype_name(dtype)}" for dtype in dtypes)
    titles = ("name", "steps", *ranges, *restarts, "source")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, entry in REGISTRY.items():
        ranges = ("{:.3f} to {:.3f}".format(*output_range(name, low)) for low in (1e-2, 1e-3))
        found = (format_restarts(name, dtype) for dtype in dtypes)
        cells = (f"`{name}`", str(entry.steps), *ranges, *found, entry.source)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spectra(size):
    """Yield the seven spectra over which singular values are bounded, and a scale."""
    i = torch.arange(size, dtype=torch.float64)
    yield torch.ones(size, dtype=torch.float64)
    yield 10.0 ** (-6 * i / (size - 1))
    yield torch.where(i < size // 2, 1.0, 1e-4)
    yield (i == 0).double()
    yield torch.where(i < size // 3, 1.0, torch.where(i < 2 * size // 3, 0.3, 0.01))
    yield 1e-30 * 10.0 ** (-2 * i / (size - 1))
    yield 1e30 * 10.0 ** (-2 * i / (size - 1))


@cache
def stacks():
    """Return a stack of each shape, and how many singular values of each matrix are >= 0.01."""
    found = []
    for size, length in SHAPES:
        stack, counts = [], []
        for sigma in spectra(size):
            for seed in range(SEEDS):
                stack.append(with_spectrum(sigma, length, seed=100 + seed))
                counts.append(int((sigma >= 0.01 * sigma.norm()).sum()))
        found.append((torch.stack(stack), counts))
    return found


def mirrored(left, right, terms):
    """Emulate the Triton kernel."""
    total = terms.alpha * (left.double() @ right.double())
    if terms.add is not None:
        total += terms.beta * terms.add.double()
    total.diagonal(dim1=-2, dim2=-1).add_(terms.gamma)
    lower = total.to(left.dtype).tril()
    return lower + lower.tril(-1).mT


def mirrored_then_identity(left, right, terms):
    """Emulate the quack kernel, after which the identity is added."""
    result = mirrored(left, right, terms._replace(gamma=0.0))
    return products.add_identity_(result, terms.gamma)


EMULATED = {
    "dense": products.dense_product,
    "blocks": products.block_product,
    "triton": mirrored,
    "quack": mirrored_then_identity,
}


def can_run(backend, coefficients, dtype):
    """Return whether anything public runs a backend, given the device that it is made for."""
    needs = _NEEDS.get(backend.product)
    if needs is not None and dtype not in needs.dtypes:
        return False
    return backend.form != "gram" or safe_restarts(coefficients, dtype) is not None


def extremes(coefficients, backend, dtype, *, aol=False):
    """Return the smallest and the largest singular value that come out of `stacks`.

    The smallest of those that were at least 0.01 of the Frobenius norm.
    """
    method = Method(coefficients, 1e-7, dtype, aol)
    smallest, largest = float("inf"), 0.0
    with (
        mock.patch.object(polar, "load_product", EMULATED.__getitem__),
        mock.patch.object(products, "SMALLEST_BLOCK", 4),
    ):
        for stack, counts in stacks():
            result = orthogonalize_stack(stack, method, backend)
            sigma = torch.linalg.svdvals(result.double().nan_to_num(posinf=1e9, nan=1e9))
            largest = max(largest, sigma.max().item())
            kept = [row[count - 1].item() for row, count in zip(sigma, counts, strict=True)]
            smallest = min(smallest, *kept)
    return smallest, largest


def bounds():
    """Yield (list, dtype, backend, extremes), None for what is refused."""
    for name, aol in [*((name, False) for name in REGISTRY), ("turbo", True)]:
        coefficients = resolve_coefficients(name)
        for dtype in DTYPES:
            try:
                check_precision(coefficients, dtype)
            except ValueError:
                continue
            for backend in BACKENDS:
                allowed = can_run(backend, coefficients, dtype)
                found = extremes(coefficients, backend, dtype, aol=aol) if allowed else None
                yield name + " (aol)" * aol, dtype_name(dtype), backend, found


def format_bounds(found):
    """Return the bounds in Markdown: a row for each list and dtype, a column for each backend."""
    rows = {}
    for name, dtype, backend, values in found:
        cell = "-" if values is None else "{:.2f} to {:.2f}".format(*values)
        rows.setdefault((name, dtype), {})[backend] = cell
    titles = " | ".join(f"`{backend}`" for backend in BACKENDS)
    lines = [f"| list | dtype | {titles} |", "|---" * (2 + len(BACKENDS)) + "|"]
    for (name, dtype), cells in rows.items():
        values = " | ".join(cells[backend] for backend in BACKENDS)
        lines.append(f"| `{name}` | {dtype} | {values} |")
    return "\n".join(lines)


def read_bounds(text):
    """Return the cells of the printed table: {(list, dtype, backend): (smallest, largest)}."""
    found = {}
    for name, dtype, cells in re.findall(r"^\| `([^`]+)` \| (\w*float\d+) \| (.*) \|$", text, re.M):
        for backend, cell in zip(BACKENDS, cells.split(" | "), strict=True):
            pair = None if cell == "-" else tuple(map(float, cell.split(" to ")))
            found[name, dtype, backend] = pair
    return found


def replace_table(page, first_words, table):
    """Return the page with the table whose header begins so replaced."""
    pattern = re.compile(rf"^\| {re.escape(first_words)} \|.*?\n(?=\n)", re.M | re.S)
    replaced, count = pattern.subn(lambda _: table + "\n", page)
    assert count == 1, first_words
    return replaced


def main():
    page = PAGE.read_text()
    page = replace_table(page, "name | steps", format_registry())
    page = replace_table(page, "list | dtype", format_bounds(bounds()))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
