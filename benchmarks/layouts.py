"""HSDP: orthogonalize each matrix once in the whole job, against once per replica.

    python benchmarks/layouts.py

On meshes of 2x2 and 2x4 gloo ranks both forms take the same steps and must agree; then they take
turns, each judged by its slowest rank. The bar is exact: the work ratio equals the number of
replicas. The time ratio is the median over turns; ranks are processes of this machine with one
thread each, so with more ranks than cores it compares the work of the whole job.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from optimizer_step import (
    AGREEMENT_STEPS,
    LR,
    TOLERANCE,
    disagreement,
    make_model,
    over_ranks,
    slowest_ms,
)
from torch.distributed.device_mesh import init_device_mesh

import dmuon

MESHES = ((2, 2), (2, 4))


@dataclass(frozen=True)
class Result:
    """One mesh: work, traffic and times of one step of each form."""

    mesh: tuple[int, int]
    repeat_ns_matrices: int
    once_ns_matrices: int
    repeat_bytes_sent: int
    once_bytes_sent: int
    repeat_ms: list[float]
    once_ms: list[float]

    @property
    def work_ratio(self) -> float:
        """Matrices orthogonalized in the job, repeated over once."""
        return self.repeat_ns_matrices / self.once_ns_matrices

    @property
    def speedup(self) -> float:
        """The median over turns of the repeated form's time over the other's."""
        return median(a / b for a, b in zip(self.repeat_ms, self.once_ms, strict=True))


def measure(shape: tuple[int, int], num_pairs: int) -> Result:
    """Check that both forms agree, then time them in turns. Collective."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    models = [make_model(mesh), make_model(mesh)]
    for model in models:
        for parameter in model.parameters():
            # Replicas have equal gradients, as after FSDP2's all-reduce.
            dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("replicate"))
    repeat, once = (
        dmuon.Muon(dmuon.param_groups(model), lr=LR, repeat_ns=repeated)
        for model, repeated in zip(models, (True, False), strict=True)
    )
    for _ in range(AGREEMENT_STEPS):
        repeat.step()
        once.step()
    found = disagreement(*models)
    if found > TOLERANCE:
        raise RuntimeError(f"the two forms differ by {found:.1e}, allowed {TOLERANCE:.1e}")
    pairs = [(slowest_ms(repeat), slowest_ms(once)) for _ in range(num_pairs)]
    total = dist.ReduceOp.SUM
    return Result(
        mesh=shape,
        repeat_ns_matrices=over_ranks(repeat.stats.ns_matrices, total),
        once_ns_matrices=over_ranks(once.stats.ns_matrices, total),
        repeat_bytes_sent=over_ranks(repeat.stats.bytes_sent, total),
        once_bytes_sent=over_ranks(once.stats.bytes_sent, total),
        repeat_ms=[pair[0] for pair in pairs],
        once_ms=[pair[1] for pair in pairs],
    )


def worker(rank: int, shape: tuple[int, int], folder: str, num_pairs: int) -> None:
    """Run one rank; rank 0 leaves the result in `folder`."""
    torch.set_num_threads(1)
    world_size = shape[0] * shape[1]
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = measure(shape, num_pairs)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(asdict(result)))
    dist.destroy_process_group()


def run(shape: tuple[int, int], num_pairs: int) -> Result:
    """Measure one mesh in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(shape, folder, num_pairs), nprocs=shape[0] * shape[1])
        return Result(**json.loads(Path(folder, "result.json").read_text()))


def table(results: list[Result]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| replicas x shards | orthogonalized per step, repeated → once | work ratio "
        "| MB sent per step, all ranks | step time ratio |",
        "|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.mesh[0]}x{r.mesh[1]} | {r.repeat_ns_matrices} → {r.once_ns_matrices} "
        f"| {r.work_ratio:.2f} "
        f"| {r.repeat_bytes_sent / 1e6:.1f} → {r.once_bytes_sent / 1e6:.1f} | {r.speedup:.2f} |"
        for r in results
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure every mesh, print the table, and fail if the work ratio is not exact."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="turns per mesh")
    arguments = parser.parse_args()
    results = [run(shape, arguments.pairs) for shape in MESHES]
    print(table(results))
    missed = [r for r in results if r.work_ratio != r.mesh[0]]
    if missed:
        raise SystemExit(f"work ratio missed on {', '.join(str(r.mesh) for r in missed)}")


if __name__ == "__main__":
    main()
