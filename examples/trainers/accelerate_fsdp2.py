"""Accelerate with FSDP2.

accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 -m examples.trainers.accelerate_fsdp2

`prepare` shards the model and puts the sharded parameters into the optimizer's groups. Their names
and routing stay, and the optimizer plans at the first step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, broadcast_object_list
from torch import nn

import dmuon
from examples.trainers.tiny import make_model, tokens


def make_accelerator() -> Accelerator:
    """FSDP2 with a checkpoint that every rank writes its part of."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    return Accelerator(fsdp_plugin=plugin)


def train(accelerator: Accelerator, folder: Path, *, resume: bool = False) -> nn.Module:
    """Train for six steps and save after the third, or go on from there."""
    model = make_model()
    # --8<-- [start:switch]
    # optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    optimizer = dmuon.Muon(dmuon.param_groups(model), lr=0.02)
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
    """Train, then train the second half again."""
    accelerator = make_accelerator()
    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    train(accelerator, Path(folder))
    accelerator.free_memory()
    train(accelerator, Path(folder), resume=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
