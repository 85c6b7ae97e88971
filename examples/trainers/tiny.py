"""What the trainer examples share: a tiny language model and its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
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


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return whole weights by name, copied. Collective where they are sharded."""
    while hasattr(model, "module"):  # DDP
        model = model.module
    return {
        name: param.detach().full_tensor() if isinstance(param, DTensor) else param.detach().clone()
        for name, param in model.named_parameters()
    }


def demonstrate(train: Callable[..., nn.Module], folder: Path) -> None:
    """Train, resume from the checkpoint that was saved half-way, and compare the weights."""
    whole = full_weights(train(folder))
    resumed = full_weights(train(folder, resume=True))
    same = all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    if dist.get_rank() == 0:
        print(f"the resumed run has {'the same' if same else 'DIFFERENT'} weights")
    dist.destroy_process_group()
    if not same:
        raise SystemExit(1)
