"""Train a small Llama with FSDP2 on the Python standard library's sources.

Compare AdamW, all-gather Muon and dmuon, or train with one of them:

    torchrun --standalone --nproc-per-node 2 examples/train.py
    torchrun --standalone --nproc-per-node 2 examples/train.py --optimizer dmuon

The three runs start from the same weights and see the same batches. They take turns, one step
each, so that whatever else the machine is doing slows all of them alike.
"""

from __future__ import annotations

import argparse
import os
import runpy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from data import batch
from model import Llama, LlamaConfig
from report import Run, Step, print_table, save, track
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import dmuon

MAX_LOSS_DIFFERENCE = 1e-4
# The default on GPUs is bfloat16, whose rounding would part the two Muon curves.
NS_DTYPE = torch.float32


@dataclass(frozen=True)
class Config:
    """One training run; `batch_size` is per rank."""

    model: LlamaConfig = field(default_factory=LlamaConfig)
    num_steps: int = 50
    warmup_steps: int = 5
    batch_size: int = 2
    context: int = 256
    lr: float = 3e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int = 0


SMOKE = Config(
    model=LlamaConfig(dim=32, hidden_dim=88, num_layers=2, num_heads=2),
    num_steps=4,
    warmup_steps=2,
    context=32,
)


def adamw(model: Llama, config: Config) -> torch.optim.Optimizer:
    """The optimizer before the change."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=config.betas,
    )


def distributed_muon(model: Llama, config: Config) -> torch.optim.Optimizer:
    """The optimizer after the change; nothing else in the training loop knows of it."""
    return dmuon.Muon(  # was: torch.optim.AdamW(
        dmuon.param_groups(model),  # was: model.parameters(),
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=config.betas,
        adjust_lr_fn="match_rms_adamw",
        ns_dtype=NS_DTYPE,
    )


def all_gather_muon(model: Llama, config: Config) -> torch.optim.Optimizer:
    """The yardstick: every rank gathers and orthogonalizes every matrix."""
    vanilla = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "vanilla.py"))
    return vanilla["AllGatherMuon"](
        dmuon.param_groups(model),
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=config.betas,
        ns_dtype=NS_DTYPE,
    )


OPTIMIZERS: dict[str, Callable[[Llama, Config], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "vanilla": all_gather_muon,
    "dmuon": distributed_muon,
}


def train(name: str, config: Config, mesh: DeviceMesh) -> Iterator[Step]:
    """Train from scratch, yielding after each step."""
    torch.manual_seed(config.seed)
    model = Llama(config.model).to(mesh.device_type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = OPTIMIZERS[name](model, config)
    scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, config))

    for step in range(config.num_steps):
        windows = config.batch_size, config.context
        inputs, targets = batch(config.seed, step, mesh.get_rank(), *windows)
        inputs, targets = inputs.to(mesh.device_type), targets.to(mesh.device_type)
        started = now()
        loss = model(inputs, targets)
        forward_done = now()
        loss.backward()
        backward_done = now()
        optimizer.step()
        optimizer_done = now()
        optimizer.zero_grad()
        scheduler.step()
        stats = getattr(optimizer, "stats", None)
        yield Step(
            loss=mean_over_ranks(loss.detach()),
            forward_ms=1e3 * (forward_done - started),
            backward_ms=1e3 * (backward_done - forward_done),
            optimizer_ms=1e3 * (optimizer_done - backward_done),
            bytes_sent=stats.bytes_sent if stats else 0,
            ns_matrices=stats.ns_matrices if stats else 0,
        )


def lr_factor(step: int, config: Config) -> float:
    """Linear warm-up, then linear decay to nothing at the last step."""
    warmup = (step + 1) / config.warmup_steps
    decay = (config.num_steps - step) / max(1, config.num_steps - config.warmup_steps)
    return min(1.0, warmup, decay)


def now() -> float:
    """Seconds, after all work given to the accelerator is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the loss of the global batch. Collective."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def make_mesh() -> DeviceMesh:
    """Return a mesh over all ranks, on this machine's accelerator where it has one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        torch.set_num_threads(1)
        return init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    return init_device_mesh(accelerator.type, (int(os.environ["WORLD_SIZE"]),))


def max_difference(one: Run, other: Run) -> float:
    """Return the largest distance between two loss curves."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), help="train with this one alone")
    parser.add_argument("--steps", type=int, help="number of steps")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model and four steps, to see that all is well"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for demo.png, demo.json and demo.md"
    )
    return parser.parse_args()


def main() -> None:
    """Train with one optimizer, or with all three and compare them."""
    arguments = parse_arguments()
    config = SMOKE if arguments.smoke else Config()
    config = replace(config, num_steps=arguments.steps or config.num_steps)
    names = [arguments.optimizer] if arguments.optimizer else list(OPTIMIZERS)
    mesh = make_mesh()

    turns = zip(*(train(name, config, mesh) for name in names), strict=True)
    history = list(track(turns, names, config.num_steps))
    runs = {
        name: Run.gather(name, steps)
        for name, steps in zip(names, zip(*history, strict=True), strict=True)
    }

    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    if is_first:
        print_table(runs.values())
        save(runs.values(), arguments.out, asdict(config) | {"world_size": mesh.size()})
    if not arguments.optimizer:
        difference = max_difference(runs["vanilla"], runs["dmuon"])
        verdict = (
            f"loss of vanilla and dmuon: largest difference {difference:.1e}, "
            f"allowed {MAX_LOSS_DIFFERENCE:.0e}"
        )
        if not difference <= MAX_LOSS_DIFFERENCE:  # also when it is NaN
            raise SystemExit(verdict)
        if is_first:
            print(verdict)


if __name__ == "__main__":
    main()
