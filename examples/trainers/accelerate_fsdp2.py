"""Accelerate with FSDP2.

torchrun --standalone --nproc-per-node 2 -m examples.trainers.accelerate_fsdp2 out/run

`prepare` shards the model and puts the sharded parameters into the optimizer's groups. Their names
and routing stay, and the optimizer plans at the first step. Without GPUs accelerate ignores the
plugin and uses DDP.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

import dmuon
from examples.trainers.tiny import demonstrate, make_model, tokens


def make_accelerator() -> Accelerator:
    """FSDP2 with a checkpoint that every rank writes its part of."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    return Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)


def train(folder: Path, *, resume: bool = False) -> nn.Module:
    """Train for six steps and save after the third, or go on from there."""
    accelerator = make_accelerator()
    model = make_model()
    # --8<-- [start:switch]
    # Before: torch.optim.AdamW(model.parameters(), lr=3e-3).
    groups = dmuon.param_groups(model)
    optimizer = dmuon.Muon(groups, lr=3e-3, adjust_lr_fn="match_rms_adamw")
    model, optimizer = accelerator.prepare(model, optimizer)
    # --8<-- [end:switch]
    # --8<-- [start:loop]
    if resume:
        accelerator.load_state(str(folder))
    for step in range(3 if resume else 0, 6):
        batch = tokens(step, accelerator.process_index, accelerator.num_processes)
        accelerator.backward(model(batch.to(accelerator.device)))
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            accelerator.save_state(str(folder))
    # --8<-- [end:loop]
    return model


def main() -> None:
    """Train, and train the second half again."""
    demonstrate(train, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
