"""Many matrices at once: those of one shape, up to transposition, share batched products."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dmuon.orthogonalize.backends import obstacle
from dmuon.orthogonalize.engine import orthogonalize
from dmuon.orthogonalize.quintic import Coefficients
from dmuon.orthogonalize.table import Table, batch_seconds, find

MAX_BATCH_BYTES = 256 * 2**20

Shape = tuple[int, int]


def orthogonalize_all(
    matrices: Sequence[Tensor],
    *,
    coefficients: Coefficients,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    table: Table | None = None,
    max_batch_bytes: int = MAX_BATCH_BYTES,
) -> list[Tensor]:
    """Return `orthogonalize(matrix)` for each matrix, in order, in few batched calls.

    Args:
        matrices: Any shapes (M, N), dtypes and devices. Not modified.
        coefficients: One `(a, b, c)` per step.
        eps: As in `orthogonalize`.
        dtype: As in `orthogonalize`.
        table: Measured choices, see `orthogonalize_tuned`; shapes for which it says that this is
            faster are padded with zeros to join a larger shape, see `padded_shapes`.
        max_batch_bytes: Bound on one stack's inputs; a larger matrix goes alone. The peak extra
            memory is about four times as much.
    """
    table = table or {}
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        kinds[matrix.dtype, matrix.device].append(index)
    results: dict[int, Tensor] = {}
    for (kind, _), members in kinds.items():
        shapes: dict[Shape, list[int]] = defaultdict(list)
        for index in members:
            shapes[_small_large(matrices[index])].append(index)
        counts = {shape: len(indices) for shape, indices in shapes.items()}
        stacked: dict[Shape, list[int]] = defaultdict(list)
        for shape, target in padded_shapes(counts, table, dtype or kind).items():
            stacked[target] += shapes[shape]
        for (rows, columns), indices in stacked.items():
            # A float32 copy is made of every stack for its norms.
            matrix_bytes = max(1, rows * columns * max(4, kind.itemsize))
            capacity = max(1, max_batch_bytes // matrix_bytes)
            for start in range(0, len(indices), capacity):
                chunk = indices[start : start + capacity]
                stack = matrices[chunk[0]].new_zeros(len(chunk), rows, columns)
                for index, wide in zip(chunk, stack, strict=True):
                    view_like(matrices[index].shape, wide).copy_(matrices[index])
                stack = orthogonalize_tuned(
                    stack, table, coefficients=coefficients, eps=eps, dtype=dtype or kind
                )
                for index, wide in zip(chunk, stack, strict=True):
                    results[index] = view_like(matrices[index].shape, wide)
    return [results[index] for index in range(len(matrices))]


def orthogonalize_tuned(
    x: Tensor, table: Table, *, coefficients: Coefficients, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return `orthogonalize(x)` by the backend and batch split that a table names for its shape.

    The entry of the nearest batch size counts. A shape that is not in the table, or whose backend
    cannot run on `x`, and everything in torch's deterministic mode, goes to "auto".

    Args:
        x: Matrices, (B, M, N) with M <= N. Not modified.
        table: From `autotune.tune` or `table.load`.
        coefficients: One `(a, b, c)` per step.
        eps: As in `orthogonalize`.
        dtype: In which to iterate.
    """
    batch, rows, columns = x.shape
    choice = find(table, dtype, batch, rows, columns)
    if choice is None or obstacle(choice.backend, coefficients, device=x.device, dtype=dtype):
        return orthogonalize(x, coefficients=coefficients, eps=eps, dtype=dtype)
    parts = [
        orthogonalize(part, coefficients=coefficients, eps=eps, dtype=dtype, backend=choice.backend)
        for part in x.tensor_split(min(choice.split, batch))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def padded_shapes(
    counts: Mapping[Shape, int], table: Table, dtype: torch.dtype
) -> dict[Shape, Shape]:
    """Return the shape to which matrices of each shape are padded with zeros, most often their own.

    Zero rows and columns stay zero and leave the rest as it is. A shape joins a larger one where
    the measured time of the joint batch is below the sum of both.

    Args:
        counts: Matrices of each shape, (smaller side, larger side).
        table: Measured times; a shape that is not in it keeps its own.
        dtype: In which the matrices are iterated.
    """
    sizes = dict(counts)
    targets = {shape: shape for shape in counts}
    for shape in sorted(counts):
        own = batch_seconds(table, dtype, sizes[shape], *shape)
        if own is None:
            continue
        savings: dict[Shape, float] = {}
        for larger, size in sizes.items():
            if larger == shape or larger[0] < shape[0] or larger[1] < shape[1]:
                continue
            apart = batch_seconds(table, dtype, size, *larger)
            joint = batch_seconds(table, dtype, size + sizes[shape], *larger)
            if apart is not None and joint is not None and joint < own + apart:
                savings[larger] = own + apart - joint
        if savings:
            best = max(savings, key=lambda larger: (savings[larger], larger))
            sizes[best] += sizes.pop(shape)
            targets = {s: best if target == shape else target for s, target in targets.items()}
    return targets


def view_like(shape: Sequence[int], wide: Tensor) -> Tensor:
    """View a matrix of `shape` in the padded wide matrix (M, N) that holds it, or its transpose."""
    small, large = sorted(shape)
    view = wide[:small, :large]
    return view.mT if shape[0] > shape[1] else view


def _small_large(matrix: Tensor) -> Shape:
    small, large = sorted(matrix.shape)
    return small, large
