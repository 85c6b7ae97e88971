"""A small model with a forward pass, and its data, for tests of wrapped models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.support.parity import full_tensor, seeded


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 9, bias=False)])
        self.norm = nn.LayerNorm(9)
        self.output = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.output(self.norm(x))


def shard_tiny(model: Tiny, mesh: DeviceMesh | None = None, **options: Any) -> Tiny:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def seeded_tiny() -> Tiny:
    torch.manual_seed(1)
    return Tiny()


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return seeded((4, 6), 1, rank, step), seeded((4, 5), 2, rank, step)


def backward(model: nn.Module, ranks: Sequence[int], step: int) -> None:
    """Gradients of the loss averaged over the batches of `ranks`."""
    for rank in ranks:
        inputs, targets = batch_of(rank, step)
        loss = nn.functional.mse_loss(model(inputs), targets)
        (loss / len(ranks)).backward()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): full_tensor(p).clone() for name, p in model.named_parameters()
    }
