"""Which matrices of an owner share a call, and what orthogonalizes each stack of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

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
    # Matrices, their own numbers of elements added up, and the time of the batch.
    batches = {
        shape: (count, count * math.prod(shape), seconds)
        for shape, count in counts.items()
        if (seconds := timings.seconds(dtype, steps, count, shape)) is not None
    }
    for shape in sorted(batches):
        count, numel, seconds = batches[shape]
        best: tuple[float, Shape, tuple[int, int, float]] | None = None
        for larger, (others, others_numel, others_seconds) in batches.items():
            if larger == shape or larger[0] < shape[0] or larger[1] < shape[1]:
                continue
            joint = (count + others, numel + others_numel)
            time = timings.seconds(dtype, steps, joint[0], larger)
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
