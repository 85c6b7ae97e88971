"""A training script that is killed in the middle of a step and of a save, for test_crash.py.

Started as `torchrun --standalone --nproc-per-node 2 --max-restarts 3 crash_worker.py FOLDER`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import dmuon

NUM_STEPS = 8
INTERVAL = 3
TIMEOUT_S = 15
# Which life of the job is killed where.
KILLED_IN_STEP = {0: 5}
KILLED_IN_SAVE = {1: 6}


# --8<-- [start:atomic]
def save(folder: Path, step: int, state: dict[str, Any], **options: Any) -> None:
    """Write a checkpoint that is seen only when it is whole. Collective."""
    unfinished = folder / f"step-{step:06d}.unfinished"
    dcp.save(state, checkpoint_id=unfinished, **options)
    if dist.get_rank() == 0:
        unfinished.rename(unfinished.with_suffix(""))
    dist.barrier()


def latest(folder: Path) -> Path | None:
    """Return the last whole checkpoint."""
    whole = [path for path in folder.glob("step-*") if path.suffix != ".unfinished"]
    return max(whole, default=None)


# --8<-- [end:atomic]


def train(folder: Path, life: int | None = None) -> dict[str, torch.Tensor]:
    """Train from the last whole checkpoint, and return the weights.

    `life` counts the restarts; without it nothing is killed.
    """
    killer = Killer(folder, life)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, 4)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = dmuon.Muon(
        dmuon.param_groups(model),
        lr=0.02,
        bucket_cap_mb=1e-4,  # several buckets, so that a peer waits for what does not come
    )
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))

    # --8<-- [start:resume]
    def state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {
            "model": model_state,
            "optimizer": optimizer_state,
            "scheduler": scheduler.state_dict(),
        }

    first_step = 1
    if checkpoint := latest(folder):
        loaded = state()
        dcp.load(loaded, checkpoint_id=checkpoint)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        scheduler.load_state_dict(loaded["scheduler"])
        first_step = int(checkpoint.name.removeprefix("step-")) + 1
    # --8<-- [end:resume]
    killer.log("start", first_step)
    dist.all_to_all_single = killer.exchange(dist.all_to_all_single)
    for step in range(first_step, NUM_STEPS + 1):
        killer.step = step
        inputs = torch.randn(
            6, 12, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())
        )
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        killer.log("step", step)
        if step % INTERVAL == 0:
            unfinished = folder / f"step-{step:06d}.unfinished"
            save(folder, step, state(), storage_writer=killer.writer(unfinished))
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


class Killer:
    """Kills rank 1, at the places that are planned for this life of the job."""

    def __init__(self, folder: Path, life: int | None) -> None:
        self.folder, self.life, self.step = folder, life, 0

    def log(self, event: str, step: int) -> None:
        """Append a line to this rank's file."""
        line = {"event": event, "step": step, "life": self.life, "time": time.time()}
        with (self.folder / f"rank-{dist.get_rank()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def kill(self, where: str) -> None:
        """Die at once, without a word to anybody."""
        self.log(f"killed in {where}", self.step)
        os.kill(os.getpid(), signal.SIGKILL)

    def exchange(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Dies at the second exchange of a step, with one under way and others still to come."""
        steps: list[int] = []

        def launch_or_die(*args: Any, **kwargs: Any) -> Any:
            steps.append(self.step)
            planned = dist.get_rank() == 1 and KILLED_IN_STEP.get(self.life) == self.step
            if planned and steps.count(self.step) == 2:
                self.kill("step")
            return launch(*args, **kwargs)

        return launch_or_die

    def writer(self, folder: Path) -> FileSystemWriter:
        """Dies when its own data is on disk and the checkpoint's metadata is not."""
        killer = self

        class Writer(FileSystemWriter):
            def write_data(self, plan: Any, planner: Any) -> Any:
                written = super().write_data(plan, planner)
                written.wait()
                if dist.get_rank() == 1 and KILLED_IN_SAVE.get(killer.life) == killer.step:
                    killer.kill("save")
                return written

        return Writer(folder)


def main() -> None:
    """Run under torchrun."""
    folder, life = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # The launcher ends the peers of a dead rank; here they are to find out by themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    if rank == 0:
        for unfinished in folder.glob("*.unfinished"):
            shutil.rmtree(unfinished)
    dist.barrier()
    try:
        weights = train(folder, life)
    except Exception:
        Killer(folder, life).log("raised", 0)
        raise
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
