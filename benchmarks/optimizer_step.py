"""Time `optimizer.step()` of dmuon against all-gather Muon, with 2, 4 and 8 gloo ranks.

    python benchmarks/optimizer_step.py --out out/optimizer_step.json

For each world size both optimizers first take the same steps on the same matrices and must agree.
Then they take turns, and each turn is judged by its slowest rank. The speedup is the median over
turns of vanilla's time / dmuon's time.

Every rank is a process of this machine with one thread. With more ranks than cores the ranks share
the cores, so the ratio compares the *work* of the whole job; with a core per rank it also shows how
well the work is balanced.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from vanilla import AllGatherMuon

import dmuon

WORLD_SIZES = (2, 4, 8)
BAR = 0.9
# Enough matrices of each shape that eight ranks can be loaded alike.
DIM, HIDDEN_DIM, NUM_BLOCKS = 384, 1024, 4
LR = 1e-2
AGREEMENT_STEPS = 2
TOLERANCE = 1e-4 * LR


@dataclass(frozen=True)
class Result:
    """One world size: times of the slowest rank, work and traffic of one step."""

    world_size: int
    vanilla_ms: list[float]
    dmuon_ms: list[float]
    vanilla_ns_matrices: int
    dmuon_ns_matrices: int
    vanilla_bytes_sent: int
    dmuon_bytes_sent: int

    @property
    def speedup(self) -> float:
        """The median over turns of vanilla's time over dmuon's."""
        return median(
            slow / fast for slow, fast in zip(self.vanilla_ms, self.dmuon_ms, strict=True)
        )

    @property
    def bar(self) -> float:
        """The least speedup that passes."""
        return BAR * self.world_size


class HiddenMatrices(nn.Module):
    """The seven matrices of each of a few Llama blocks; never run forward."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {name: (DIM, DIM) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        shapes |= {
            "gate_proj": (DIM, HIDDEN_DIM),
            "up_proj": (DIM, HIDDEN_DIM),
            "down_proj": (HIDDEN_DIM, DIM),
        }
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
            for _ in range(NUM_BLOCKS)
        )


def make_model(mesh: DeviceMesh) -> HiddenMatrices:
    """Return the matrices, sharded by FSDP2, each with a gradient; the same on every call."""
    torch.manual_seed(0)
    model = HiddenMatrices()
    fully_shard(model, mesh=mesh)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        grad = torch.randn(parameter.shape)
        parameter.grad = distribute_tensor(grad, mesh, parameter.placements, src_data_rank=None)
    return model


def disagreement(one: nn.Module, other: nn.Module) -> float:
    """Return the largest distance between the weights of two models, over all ranks. Collective."""
    worst = torch.zeros(())
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        worst = torch.maximum(worst, (left.to_local() - right.to_local()).abs().max())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def slowest_ms(optimizer: Optimizer) -> float:
    """Take a step on all ranks together and return the time of the slowest. Collective."""
    dist.barrier()
    started = time.perf_counter()
    optimizer.step()
    elapsed_ms = torch.tensor(1e3 * (time.perf_counter() - started), dtype=torch.float64)
    dist.all_reduce(elapsed_ms, dist.ReduceOp.MAX)
    return elapsed_ms.item()


def over_ranks(count: int, op: dist.ReduceOp.RedOpType) -> int:
    """Reduce a count over ranks. Collective."""
    total = torch.tensor(count)
    dist.all_reduce(total, op)
    return int(total)


def measure(mesh: DeviceMesh, num_pairs: int) -> Result:
    """Check that both optimizers agree, then time them in turns. Collective."""
    models = make_model(mesh), make_model(mesh)
    vanilla = AllGatherMuon(dmuon.param_groups(models[0]), lr=LR)
    ours = dmuon.Muon(dmuon.param_groups(models[1]), lr=LR, adjust_lr_fn="match_rms_adamw")
    for _ in range(AGREEMENT_STEPS):
        vanilla.step()
        ours.step()
    found = disagreement(*models)
    if found > TOLERANCE:
        raise RuntimeError(f"dmuon and vanilla differ by {found:.1e}, allowed {TOLERANCE:.1e}")
    pairs = [(slowest_ms(vanilla), slowest_ms(ours)) for _ in range(num_pairs)]
    return Result(
        world_size=mesh.size(),
        vanilla_ms=[pair[0] for pair in pairs],
        dmuon_ms=[pair[1] for pair in pairs],
        vanilla_ns_matrices=over_ranks(vanilla.stats.ns_matrices, dist.ReduceOp.SUM),
        dmuon_ns_matrices=over_ranks(ours.stats.ns_matrices, dist.ReduceOp.SUM),
        vanilla_bytes_sent=over_ranks(vanilla.stats.bytes_sent, dist.ReduceOp.MAX),
        dmuon_bytes_sent=over_ranks(ours.stats.bytes_sent, dist.ReduceOp.MAX),
    )


def worker(rank: int, world_size: int, folder: str, num_pairs: int) -> None:
    """Run one rank; rank 0 leaves the result in `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = measure(init_device_mesh("cpu", (world_size,)), num_pairs)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(asdict(result)))
    dist.destroy_process_group()


def run(world_size: int, num_pairs: int) -> Result:
    """Measure one world size in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(world_size, folder, num_pairs), nprocs=world_size)
        return Result(**json.loads(Path(folder, "result.json").read_text()))


HEADING = """\
| ranks | vanilla ms | dmuon ms | speedup | bar | NS matrices, all ranks | MB sent, busiest rank |
|---:|---:|---:|---:|---:|---:|---:|"""


def row(r: Result) -> str:
    """Return a result as a row of a Markdown table; vanilla's counts come first."""
    cells = (
        str(r.world_size),
        f"{median(r.vanilla_ms):.0f}",
        f"{median(r.dmuon_ms):.0f}",
        f"{r.speedup:.2f}",
        f"{r.bar:.2f}",
        f"{r.vanilla_ns_matrices} → {r.dmuon_ns_matrices}",
        f"{r.vanilla_bytes_sent / 1e6:.1f} → {r.dmuon_bytes_sent / 1e6:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure every world size, print the table, and fail where the bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write the results here, as JSON")
    parser.add_argument("--pairs", type=int, default=3, help="turns per world size")
    arguments = parser.parse_args()

    results = []
    print(HEADING)
    for world_size in WORLD_SIZES:
        results.append(run(world_size, arguments.pairs))
        print(row(results[-1]), flush=True)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(r) | {"speedup": r.speedup, "bar": r.bar} for r in results]
        arguments.out.write_text(
            json.dumps({"torch": torch.__version__, "results": rows}, indent=2) + "\n"
        )
    missed = [r for r in results if r.speedup < r.bar]
    if missed:
        raise SystemExit(
            "; ".join(f"{r.world_size} ranks: {r.speedup:.2f} is below {r.bar:.2f}" for r in missed)
        )


if __name__ == "__main__":
    main()
