"""torchtitan's optimizer and scheduler containers and checkpoint format, with FSDP2.

torchrun --standalone --nproc-per-node 2 -m examples.trainers.torchtitan_container out/run

In a torchtitan run only the config changes; the loop below stands for torchtitan's trainer, which
needs GPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

from dmuon.integrations.torchtitan import default_muon
from examples.trainers.tiny import demonstrate, make_model, tokens


def optimizer_config() -> OptimizersContainer.Config:
    """The part of a run's config that changes."""
    # --8<-- [start:switch]
    optimizer = default_muon(lr=8e-4)  # was default_adamw(lr=8e-4)
    # --8<-- [end:switch]
    return optimizer


def checkpoint(
    model: nn.Module, optimizers: OptimizersContainer, schedulers: LRSchedulersContainer
) -> dict[str, object]:
    """What torchtitan's checkpointer gives to `dcp`, which loads the parameters in place."""
    return {
        **get_model_state_dict(model),
        "optimizer": optimizers,
        "lr_scheduler": schedulers,
    }


def train(folder: Path, *, resume: bool = False) -> nn.Module:
    """Train for six steps and save after the third, or go on from there."""
    model = make_model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizers = optimizer_config().build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=6
    )

    if resume:
        dcp.load(checkpoint(model, optimizers, schedulers), checkpoint_id=folder)
    for step in range(3 if resume else 0, 6):
        model(tokens(step, dist.get_rank(), dist.get_world_size())).backward()
        optimizers.step()
        optimizers.zero_grad()
        schedulers.step()
        if step == 2:
            dcp.save(checkpoint(model, optimizers, schedulers), checkpoint_id=folder)
    return model


def main() -> None:
    """Train, and train the second half again."""
    dist.init_process_group()
    demonstrate(train, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
