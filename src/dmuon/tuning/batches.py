"""Many matrices at once: those of one shape, up to transposition, share batched products."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dmuon.newton_schulz.backends import obstacle
from dmuon.newton_schulz.engine import orthogonalize
from dmuon.newton_schulz.quintic import Coefficients
from dmuon.tuning.table import Shape, Table

MAX_BATCH_BYTES = 256 * 2**20
# How many times their own size matrices may take when they are padded.
MAX_PADDING = 2


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
        table: Measured choices, see `orthogonalize_tuned` and `stacks`.
        max_batch_bytes: Bound on one stack of inputs, in the wider of its dtype, `dtype` and
            float32; a larger matrix goes alone. The peak extra memory is about six times as much.

    Returns:
        New tensors; those that were stacked together share memory.

    Raises:
        ValueError: As in `orthogonalize`; or an entry is no matrix.
    """
    table, coefficients = table or Table(), tuple(coefficients)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        if matrix.ndim != 2:
            raise ValueError(f"matrices[{index}] has shape {tuple(matrix.shape)}, not (M, N)")
        kinds[matrix.dtype, matrix.device].append(index)
    results: dict[int, Tensor] = {}
    for (kind, device), members in kinds.items():
        shapes = [matrices[index].shape for index in members]
        width = max(4, kind.itemsize, (dtype or kind).itemsize)
        for (rows, columns), positions in stacks(
            shapes, table, dtype=dtype or kind, steps=len(coefficients)
        ):
            capacity = max(1, max_batch_bytes // max(1, rows * columns * width))
            for start in range(0, len(positions), capacity):
                chunk = [members[i] for i in positions[start : start + capacity]]
                stack = torch.zeros(len(chunk), rows, columns, dtype=kind, device=device)
                sources = [matrices[index].detach() for index in chunk]
                views = [view_like(x.shape, wide) for x, wide in zip(sources, stack, strict=True)]
                torch._foreach_copy_(views, sources)
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

    The entry of the nearest number of steps and batch size counts. A shape that is not in the
    table, or whose backend cannot run on `x`, and everything in torch's deterministic mode, goes to
    "auto".

    Args:
        x: Matrices, (B, M, N) with M <= N. Not modified.
        table: From `autotune.tune` or `table.load`.
        coefficients: One `(a, b, c)` per step.
        eps: As in `orthogonalize`.
        dtype: In which to iterate.
    """
    batch, rows, columns = x.shape
    choice = table.find(dtype, len(coefficients), batch, (rows, columns))
    if choice is None or obstacle(choice.backend, coefficients, device=x.device, dtype=dtype):
        return orthogonalize(x, coefficients=coefficients, eps=eps, dtype=dtype)
    return orthogonalize_parts(
        x, choice.split, coefficients=coefficients, eps=eps, dtype=dtype, backend=choice.backend
    )


def orthogonalize_parts(
    x: Tensor,
    split: int,
    *,
    coefficients: Coefficients,
    backend: str,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `orthogonalize(x)` of a batch (B, M, N), in `split` parts one after the other."""
    parts = [
        orthogonalize(part, coefficients=coefficients, eps=eps, dtype=dtype, backend=backend)
        for part in x.tensor_split(min(split, len(x)))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def stacks(
    shapes: Sequence[Sequence[int]], table: Table, *, dtype: torch.dtype, steps: int
) -> list[tuple[Shape, list[int]]]:
    """Return which matrices to stack: the shape of each stack, wide, and indices into `shapes`.

    Matrices of one shape up to transposition are stacked, and others where `padded_shapes` says so.
    """
    members: dict[Shape, list[int]] = defaultdict(list)
    for index, shape in enumerate(shapes):
        small, large = sorted(shape)
        members[small, large].append(index)
    counts = {shape: len(indices) for shape, indices in members.items()}
    joined: dict[Shape, list[int]] = defaultdict(list)
    for shape, target in padded_shapes(counts, table, dtype=dtype, steps=steps).items():
        joined[target] += members[shape]
    return list(joined.items())


def padded_shapes(
    counts: Mapping[Shape, int], table: Table, *, dtype: torch.dtype, steps: int
) -> dict[Shape, Shape]:
    """Return the shape to which matrices of each shape are padded with zeros, most often their own.

    Zero rows and columns stay zero and leave the rest as it is. A shape joins a larger one where
    the measured time of the joint batch is below the sum of both, unless the joint batch would take
    more than `MAX_PADDING` times the memory.

    Args:
        counts: Matrices of each shape, (smaller side, larger side).
        table: Measured times; a shape that is not in it keeps its own.
        dtype: In which the matrices are iterated.
        steps: Newton-Schulz steps.
    """
    targets = {shape: shape for shape in counts}
    # Matrices, their own numbers of elements added up, and the time of the batch.
    batches = {
        shape: (count, count * math.prod(shape), seconds)
        for shape, count in counts.items()
        if (seconds := table.seconds(dtype, steps, count, shape)) is not None
    }
    for shape in sorted(batches):
        count, numel, seconds = batches[shape]
        best: tuple[float, Shape, tuple[int, int, float]] | None = None
        for larger, (others, others_numel, others_seconds) in batches.items():
            if larger == shape or larger[0] < shape[0] or larger[1] < shape[1]:
                continue
            joint = (count + others, numel + others_numel)
            time = table.seconds(dtype, steps, joint[0], larger)
            if time is None or joint[0] * math.prod(larger) > MAX_PADDING * joint[1]:
                continue
            saved = seconds + others_seconds - time
            if saved > 0 and (best is None or (saved, larger) > best[:2]):
                best = (saved, larger, (*joint, time))
        if best is not None:
            _, target, joined = best
            del batches[shape]
            batches[target] = joined
            targets = {s: target if t == shape else t for s, t in targets.items()}
    return targets


def view_like(shape: Sequence[int], wide: Tensor) -> Tensor:
    """View a matrix of `shape` in the padded wide matrix (M, N) that holds it, or its transpose."""
    small, large = sorted(shape)
    view = wide[:small, :large]
    return view.mT if shape[0] > shape[1] else view
