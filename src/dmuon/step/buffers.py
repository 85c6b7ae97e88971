"""Local tensors to flat buffers and back, and strided copies between buffers.

All of it is a few calls for any number of equal tensors: see `dmuon.plan.copies`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dmuon.plan.copies import Copy, contiguous
from dmuon.plan.program import Flat


def flatten(
    tensors: Sequence[Tensor], flat: Flat, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Write the tensors of slabs one behind the other into a new buffer of `flat.numel` elements.

    Args:
        tensors: One for each slab, of its shape.
        flat: The slabs.
        dtype: dtype of the buffer.
        device: Where the buffer lies.
    """
    if len(flat.runs) == 1:
        return torch.stack(list(tensors)).to(device, dtype).reshape(-1)
    buffer = torch.empty(flat.numel, dtype=dtype, device=device)
    for run in flat.runs:
        members = tensors[run.start : run.stop]
        into = buffer[run.first : run.last].view(len(members), *run.shape)
        if members[0].dtype == dtype and members[0].device == device:
            torch.stack(list(members), out=into)
        else:
            into.copy_(torch.stack(list(members)))
    return buffer


def unflatten(buffer: Tensor, flat: Flat) -> list[Tensor]:
    """View what `flatten` wrote: one tensor for each slab, of its shape."""
    tensors: list[Tensor] = []
    for run in flat.runs:
        stack = buffer[run.first : run.last].view(run.stop - run.start, *run.shape)
        tensors += stack.unbind()
    return tensors


def unpacked(stack: Tensor, dtype: torch.dtype) -> Tensor:
    """State of rows in its own dtype, from what travelled in that of the wire."""
    if stack.dtype.itemsize < dtype.itemsize:
        # A copy, since the place in a buffer may not be aligned for the wider dtype.
        return stack.clone(memory_format=torch.contiguous_format).view(dtype)
    return stack.to(dtype)


def packed(stack: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `unpacked`."""
    return stack.view(dtype) if dtype.itemsize < stack.dtype.itemsize else stack.to(dtype)


def collect(
    numel: int,
    sources: Iterable[tuple[Tensor, Sequence[Copy]]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    is_padded: bool = False,
) -> Tensor:
    """Fill a flat buffer of `numel` elements from others; a part of one of them if that is equal.

    Args:
        numel: Size of the buffer.
        sources: Flat buffers, each with the copies that are taken from it.
        dtype: dtype of the buffer.
        device: Where it lies.
        is_padded: The copies leave gaps, which are zero.
    """
    sources = [(source, copies) for source, copies in sources if copies]
    if len(sources) == 1:
        source, copies = sources[0]
        start = contiguous(copies, numel)
        if start is not None:
            return source[start : start + numel]
    make = torch.zeros if is_padded else torch.empty
    target = make(numel, dtype=dtype, device=device)
    for source, copies in sources:
        copy_(target, source, copies)
    return target


def copy_(target: Tensor, source: Tensor, copies: Sequence[Copy]) -> None:
    """Carry out copies between two flat buffers.

    Modifies: `target`.
    """
    there, here = source.storage_offset(), target.storage_offset()
    sources = [source.as_strided(c.shape, c.source_strides, there + c.source) for c in copies]
    targets = [target.as_strided(c.shape, c.target_strides, here + c.target) for c in copies]
    torch._foreach_copy_(targets, sources)
