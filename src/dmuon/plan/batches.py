"""Which matrices of an owner share a call, and what orthogonalizes each stack of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dmuon.newton_schulz.backend import Backend
from dmuon.newton_schulz.choice import cached_parts, choose_backend, obstacle
from dmuon.plan.cost import Shape, Timings

if TYPE_CHECKING:
    import torch

    from dmuon.newton_schulz import Method

# How many times their own size matrices may take when they are padded.
MAX_PADDING = 2


def resolve_backend(
    method: Method, timings: Timings, batch: int, shape: Shape, device: torch.device
) -> tuple[Backend, int]:
    """Return what `orthogonalize_stack` is to run for a stack, and in how many parts.

    The measured choice of the nearest number of steps and batch size counts; where there is none,
    or it cannot run there, `choose_backend` does.

    Args:
        method: What is computed.
        timings: Measured choices; may be empty.
        batch: Number of matrices.
        shape: Of each, smaller side first.
        device: Where.
    """
    choice = timings.find(method.dtype_name, method.steps, batch, shape)
    parts = cached_parts(batch, shape, method.dtype, device.type)
    if choice is None or obstacle(choice.backend, method.coefficients, device, method.dtype):
        backend = choose_backend(
            shape, method.coefficients, dtype=method.dtype, device_type=device.type
        )
        return backend, parts
    return choice.backend, parts if device.type == "cpu" else min(choice.parts, batch)


def batch_shapes(
    shapes: Sequence[Sequence[int]], timings: Timings, *, dtype: str, steps: int
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
    for shape, target in padded_shapes(counts, timings, dtype=dtype, steps=steps).items():
        joined[target] += members[shape]
    return list(joined.items())


class _Batch(NamedTuple):
    """Matrices of a call: shape, how many, their own numbers of elements, measured seconds."""

    shape: Shape
    matrices: int
    numel: int
    seconds: float


def padded_shapes(
    counts: Mapping[Shape, int], timings: Timings, *, dtype: str, steps: int
) -> dict[Shape, Shape]:
    """Return the shape to which matrices of each shape are padded with zeros, most often their own.

    Zero rows and columns stay zero and leave the rest as it is. A shape joins a larger one where
    the measured time of the joint batch is below the sum of both, unless the joint batch would take
    more than `MAX_PADDING` times the memory.

    Args:
        counts: Matrices of each shape, (smaller side, larger side).
        timings: Measured times; a shape that is not among them keeps its own.
        dtype: Name of the dtype in which the matrices are iterated.
        steps: Newton-Schulz steps.
    """
    targets = {shape: shape for shape in counts}
    batches = {
        shape: _Batch(shape, count, count * math.prod(shape), seconds)
        for shape, count in counts.items()
        if (seconds := timings.seconds(dtype, steps, count, shape)) is not None
    }
    for shape in sorted(batches):
        batch = batches.pop(shape)
        joint = [_join(batch, larger, timings, dtype, steps) for larger in batches.values()]
        saved = {
            joined: batch.seconds + batches[joined.shape].seconds - joined.seconds
            for joined in joint
            if joined is not None
        }
        best = max(saved, key=lambda joined: (saved[joined], joined.shape), default=batch)
        batches[best.shape] = best
        targets = {s: best.shape if t == shape else t for s, t in targets.items()}
    return targets


def _join(small: _Batch, large: _Batch, timings: Timings, dtype: str, steps: int) -> _Batch | None:
    """Return both as one batch of the larger shape, if that holds both, is faster, and no waste."""
    shape = large.shape
    if small.shape[0] > shape[0] or small.shape[1] > shape[1]:
        return None
    matrices, numel = small.matrices + large.matrices, small.numel + large.numel
    seconds = timings.seconds(dtype, steps, matrices, shape)
    if seconds is None or seconds >= small.seconds + large.seconds:
        return None
    wasteful = matrices * math.prod(shape) > MAX_PADDING * numel
    return None if wasteful else _Batch(shape, matrices, numel, seconds)
