"""Strided copies between flat buffers: how pieces are packed, pasted and cut, in few operations.

Many equal pieces at equal distances are one copy with one more dim. So what a step executes does
not grow with the number of equal matrices, nor, for even shards, with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A block of elements, in a source and in a target buffer; counted in elements.

    Attributes:
        shape: Its shape.
        source: Where its first element lies in the source.
        source_strides: Distance of neighbors there, by dim.
        target: Where its first element goes in the target.
        target_strides: Distance of neighbors there, by dim.
    """

    shape: tuple[int, ...]
    source: int
    source_strides: Strides
    target: int
    target_strides: Strides


def merge(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """Join copies, in the order given, into as few as a single sweep per dim finds.

    Args:
        copies: Blocks that do not overlap in the target.

    Returns:
        Copies of the same elements.
    """
    merged = [_simplified(copy) for copy in copies]
    while True:
        joined = [_simplified(copy) for copy in _join_progressions(merged)]
        if len(joined) == len(merged):
            return tuple(joined)
        merged = joined


def contiguous(copies: Sequence[Copy], numel: int) -> int | None:
    """Where a source holds, in one piece, just what a whole target of `numel` will; or None."""
    if len(copies) != 1:
        return None
    (copy,) = copies
    whole = Copy((numel,), copy.source, (1,), 0, (1,))
    return copy.source if copy == whole else None


def _simplified(copy: Copy) -> Copy:
    """The same copy without dims of size 1, and with dims joined that are contiguous on both sides.

    A single element keeps one dim.
    """
    shape: list[int] = []
    source: list[int] = []
    target: list[int] = []
    for size, s, t in zip(copy.shape, copy.source_strides, copy.target_strides, strict=True):
        if size == 1:
            continue
        if shape and source[-1] == size * s and target[-1] == size * t:
            shape[-1], source[-1], target[-1] = shape[-1] * size, s, t
        else:
            shape.append(size)
            source.append(s)
            target.append(t)
    if not shape:
        shape, source, target = [1], [1], [1]
    return replace(
        copy, shape=tuple(shape), source_strides=tuple(source), target_strides=tuple(target)
    )


def _join_progressions(copies: Sequence[Copy]) -> list[Copy]:
    """Join neighbors of equal form whose offsets form arithmetic progressions."""
    joined: list[Copy] = []
    start = 0
    while start < len(copies):
        first, stop = copies[start], start + 1
        step = _step(first, copies[stop]) if stop < len(copies) else None
        while stop < len(copies) and step and _step(copies[stop - 1], copies[stop]) == step:
            stop += 1
        if step and stop - start > 1:
            first = Copy(
                (stop - start, *first.shape),
                first.source,
                (step[0], *first.source_strides),
                first.target,
                (step[1], *first.target_strides),
            )
        joined.append(first)
        start = stop
    return joined


def _step(one: Copy, other: Copy) -> tuple[int, int] | None:
    """Distance of two copies of equal form in both buffers; torch has no negative strides."""
    if (one.shape, one.source_strides, one.target_strides) != (
        other.shape,
        other.source_strides,
        other.target_strides,
    ):
        return None
    step = other.source - one.source, other.target - one.target
    return step if min(step) > 0 else None
