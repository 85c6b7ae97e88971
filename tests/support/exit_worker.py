"""DDP jobs that end right after a step, for test_exit.py; prints how their ranks ended.

Ranks are forks of one process, which has imported everything, and end as any interpreter does
(those of multiprocessing are cut short).
"""

import os
import sys
from pathlib import Path

import torch
import torch._dynamo  # which an optimizer's first step imports: once, not in every rank
import torch.distributed as dist
from torch import nn

import dmuon

NUM_RANKS = 4


def train(rank, store, nonfinite):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=NUM_RANKS, store=dist.FileStore(str(store), NUM_RANKS)
    )
    params = [nn.Parameter(torch.ones(6 + i, 4)) for i in range(4)] + [nn.Parameter(torch.ones(5))]
    groups = [{"params": params[:4]}, {"params": params[4:], "algorithm": "adamw"}]
    optimizer = dmuon.Muon(groups, process_group=dist.group.WORLD, nonfinite=nonfinite)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p) * (rank + 1)
        dmuon.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()


def run(store, nonfinite):
    """Start the ranks of one job; their exit codes. Returns None in a rank that has trained."""
    ranks = []
    for rank in range(NUM_RANKS):
        if not (pid := os.fork()):
            train(rank, store, nonfinite)
            return None
        ranks.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]


def main(folder, num_runs):
    for number in range(num_runs):
        codes = run(Path(folder) / f"store-{number}", ("propagate", "skip")[number % 2])
        if codes is None:
            return
        print(codes, flush=True)


main(sys.argv[1], int(sys.argv[2]))
