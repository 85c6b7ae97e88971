"""What the trainer examples share: a tiny language model and its data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, DIM, HIDDEN = 64, 32, 44
NUM_BATCHES, BATCH_SIZE, LENGTH = 3, 8, 9


class Block(nn.Module):
    """A pre-norm residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC + self.down(F.silu(self.up(self.norm(x_BTC))))


class TinyLM(nn.Module):
    """Next-token model; called with tokens it returns the mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT[:, :-1])
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return F.cross_entropy(self.lm_head(x_BTC).flatten(0, 1), tokens_BT[:, 1:].flatten())


def make_model() -> TinyLM:
    """Return the same weights on every rank."""
    torch.manual_seed(0)
    return TinyLM()


def dataset() -> Tensor:
    """Return one epoch, int64 (NUM_BATCHES * BATCH_SIZE, LENGTH), the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCAB, (NUM_BATCHES * BATCH_SIZE, LENGTH), generator=generator)


def tokens(step: int, rank: int, world_size: int) -> Tensor:
    """Return this rank's rows of the batch of a step."""
    start = step % NUM_BATCHES * BATCH_SIZE
    return dataset()[start : start + BATCH_SIZE][rank::world_size]
