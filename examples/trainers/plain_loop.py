"""A plain loop with FSDP2 and distributed checkpoints.

torchrun --standalone --nproc-per-node 2 -m examples.trainers.plain_loop out/run
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import dmuon
from examples.trainers.tiny import demonstrate, make_model, tokens


def train(folder: Path, *, resume: bool = False) -> nn.Module:
    """Train for six steps and save after the third, or go on from there."""
    model = make_model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    # --8<-- [start:switch]
    # Before: torch.optim.AdamW(model.parameters(), lr=3e-3).
    groups = dmuon.param_groups(model)
    optimizer = dmuon.Muon(groups, lr=3e-3, adjust_lr_fn="match_rms_adamw")
    # --8<-- [end:switch]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)

    # --8<-- [start:load]
    if resume:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        saved = {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
    # --8<-- [end:load]
    for step in range(3 if resume else 0, 6):
        loss = model(tokens(step, dist.get_rank(), dist.get_world_size()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step == 2:
            # --8<-- [start:save]
            model_state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save(
                {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler},
                checkpoint_id=folder,
            )
            # --8<-- [end:save]
    return model


def main() -> None:
    """Train, and train the second half again."""
    dist.init_process_group()
    demonstrate(train, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
