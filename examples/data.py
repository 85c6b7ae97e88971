"""Real text that is on every machine: the Python standard library's own sources, as bytes."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


@cache
def corpus() -> Tensor:
    """Return the standard library's top-level modules, joined: one uint8 token per byte."""
    sources = sorted(Path(os.__file__).parent.glob("[a-z]*.py"))
    return torch.frombuffer(
        bytearray(b"\n".join(path.read_bytes() for path in sources)), dtype=torch.uint8
    )


def batch(seed: int, step: int, rank: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next-byte targets, int64 (batch_size, context), set by the arguments."""
    text = corpus()
    draw = random.Random(f"{seed}/{step}/{rank}")
    starts = [draw.randrange(len(text) - context) for _ in range(batch_size)]
    windows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]
