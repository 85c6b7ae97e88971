"""Time `optimizer.step()` on many small weights, where the time is the host's, against AdamW's.

    python benchmarks/host_time.py --out out/host_time.json

The optimizers take turns on the same tensors, with one thread, and each ratio is one of medians
over turns: an optimizer's time to that of `torch.optim.AdamW(foreach=True)`. With one Newton-Schulz
step there is next to no arithmetic, so those rows have a bar; rows with five steps are for
information. The 64 ranks are a `fake` process group: this process is rank 0, and collectives return
at once, so that what is timed is what one rank of the job has to do itself.

Then the operators that one step dispatches are counted, for a number of weights and for twice as
many: outside `foreach` lists the counts must be the same, but for the view that torch itself takes
in `DTensor.to_local` of each parameter (pytorch/pytorch issue 166156), which is counted apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import dmuon

WARM_UP_STEPS = 3
# Outside `foreach` lists, twice these many weights must not dispatch more operators.
NUM_COUNTED = 100


@dataclass(frozen=True)
class Case:
    """Equal square weights: how many, their size, on how many ranks, and the highest ratio."""

    num: int
    dim: int
    world_size: int
    bar: float
    peer: bool = False

    @property
    def layout(self) -> str:
        """Where the weights lie, in words."""
        return f"FSDP2, {self.world_size} ranks" if self.world_size > 1 else "one process"


CASES = (Case(400, 64, 64, bar=1.0), Case(2000, 16, 1, bar=2.0, peer=True))


@dataclass(frozen=True)
class Timing:
    """One optimizer in one case: time of each step, and of AdamW's in between."""

    case: Case
    optimizer: str
    ns_steps: int
    step_ms: list[float]
    adamw_ms: list[float]
    bar: float | None

    @property
    def ratio(self) -> float:
        """The median time over AdamW's."""
        return median(self.step_ms) / median(self.adamw_ms)

    @property
    def missed(self) -> bool:
        """Whether the ratio is above its bar."""
        return self.bar is not None and self.ratio > self.bar


@dataclass(frozen=True)
class Operators:
    """What one step dispatches, for a number of weights and for twice as many.

    Attributes:
        others: Operators outside `foreach` that no other operator calls, without the next.
        local_views: `aten::view_as`, which `DTensor.to_local` calls once for a parameter.
        foreach: Calls of a `foreach` operator.
        inside: Operators inside those, as a device without fused `foreach` kernels runs them.
    """

    case: Case
    others: tuple[int, int]
    local_views: tuple[int, int]
    foreach: tuple[int, int]
    inside: tuple[int, int]

    @property
    def missed(self) -> bool:
        """Whether the number of operators depends on the number of weights."""
        num_dtensors = NUM_COUNTED if self.case.world_size > 1 else 0
        has_more_views = any(
            found > allowed
            for found, allowed in zip(
                self.local_views, (num_dtensors, 2 * num_dtensors), strict=True
            )
        )
        return self.others[0] != self.others[1] or has_more_views


class Weights(nn.Module):
    """Equal square matrices; never run forward."""

    def __init__(self, num: int, dim: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(dim, dim) for _ in range(num))


@contextlib.contextmanager
def world(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of many for a while; of one, without a process group."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_params(case: Case, num: int) -> list[nn.Parameter]:
    """Return the weights of a case, each with a gradient, sharded by rows over its ranks."""
    torch.manual_seed(0)
    model = Weights(num, case.dim)
    if case.world_size > 1:
        mesh = init_device_mesh("cpu", (case.world_size,))
        fully_shard(model, mesh=mesh)
    for param in model.parameters():
        grad = torch.randn(param.shape)
        if case.world_size > 1:
            grad = distribute_tensor(grad, mesh, param.placements, src_data_rank=None)
        param.grad = grad
    return list(model.parameters())


def step_ms(optimizer: Optimizer) -> float:
    """Take a step and return its time."""
    started = time.perf_counter()
    optimizer.step()
    return 1e3 * (time.perf_counter() - started)


def timings(case: Case, ns_steps: int, num_pairs: int) -> Iterator[Timing]:
    """Time dmuon, and where a case asks for it torch's own Muon, in turns with AdamW."""
    params = make_params(case, case.num)
    adamw = torch.optim.AdamW(params, foreach=True)
    optimizers: dict[str, Optimizer] = {"dmuon.Muon": dmuon.Muon(params, ns_steps=ns_steps)}
    if case.peer:
        optimizers["torch.optim.Muon"] = torch.optim.Muon(params, ns_steps=ns_steps)
    for name, optimizer in optimizers.items():
        for _ in range(WARM_UP_STEPS):
            optimizer.step()
            adamw.step()
        pairs = [(step_ms(optimizer), step_ms(adamw)) for _ in range(num_pairs)]
        has_bar = name == "dmuon.Muon" and ns_steps == 1
        yield Timing(
            case=case,
            optimizer=name,
            ns_steps=ns_steps,
            step_ms=[pair[0] for pair in pairs],
            adamw_ms=[pair[1] for pair in pairs],
            bar=case.bar if has_bar else None,
        )


def caller(event: FunctionEvent) -> FunctionEvent | None:
    """Return the outermost operator that runs `event`, or None if no operator does."""
    outermost = None
    while (event := event.cpu_parent) is not None:
        if "::" in event.name:
            outermost = event
    return outermost


def count_operators(case: Case, num: int) -> tuple[int, int, int, int]:
    """Return `others`, `local_views`, `foreach` and `inside` of a step on `num` weights."""
    optimizer = dmuon.Muon(make_params(case, num), ns_steps=1)
    for _ in range(WARM_UP_STEPS):
        optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        optimizer.step()
    others = local_views = foreach = inside = 0
    for event in profiler.events():
        if "::" not in event.name:  # a label, not an operator
            continue
        outermost = caller(event)
        if outermost is None:
            is_foreach = event.name.startswith("aten::_foreach_")
            is_local_view = event.name == "aten::view_as"
            foreach += is_foreach
            local_views += is_local_view
            others += not is_foreach and not is_local_view
        else:
            inside += outermost.name.startswith("aten::_foreach_")
    return others, local_views, foreach, inside


def operators(case: Case) -> Operators:
    """Count the operators of a case for `NUM_COUNTED` weights and for twice as many."""
    counts = [count_operators(case, num) for num in (NUM_COUNTED, 2 * NUM_COUNTED)]
    return Operators(case, *zip(*counts, strict=True))


TIMINGS_HEADING = """\
| weights | layout | optimizer | NS steps | ms | AdamW ms | ratio | bar |
|---:|---|---|---:|---:|---:|---:|---:|"""
OPERATORS_HEADING = """\
| weights | layout | outside foreach | views of `to_local` | foreach calls | inside foreach |
|---:|---|---:|---:|---:|---:|"""


def timing_row(t: Timing) -> str:
    """Return times as a row of a Markdown table."""
    cells = (
        f"{t.case.num} x {t.case.dim}²",
        t.case.layout,
        t.optimizer,
        str(t.ns_steps),
        f"{median(t.step_ms):.1f}",
        f"{median(t.adamw_ms):.1f}",
        f"{t.ratio:.2f}",
        "-" if t.bar is None else f"{t.bar:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def operators_row(o: Operators) -> str:
    """Return counts as a row of a Markdown table; those of twice as many weights come second."""
    cells = (
        f"{NUM_COUNTED} → {2 * NUM_COUNTED} x {o.case.dim}²",
        o.case.layout,
        *(f"{one} → {two}" for one, two in (o.others, o.local_views, o.foreach, o.inside)),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure every case, print the tables, and fail where a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write the results here, as JSON")
    parser.add_argument("--pairs", type=int, default=15, help="turns per row")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    timed, counted, missed = [], [], []
    print(TIMINGS_HEADING)
    for case in CASES:
        for ns_steps in (1, 5):
            with world(case.world_size):
                for timing in timings(case, ns_steps, arguments.pairs):
                    timed.append(timing)
                    print(timing_row(timing), flush=True)
                    if timing.missed:
                        missed.append(
                            f"{case.num} weights, {case.layout}: "
                            f"ratio {timing.ratio:.2f} is above {timing.bar:.2f}"
                        )
    print(f"\n{OPERATORS_HEADING}")
    for case in CASES:
        with world(case.world_size):
            counted.append(operators(case))
        print(operators_row(counted[-1]), flush=True)
        if counted[-1].missed:
            missed.append(f"{case.layout}: operators grow with the number of weights")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        results = {
            "torch": torch.__version__,
            "timings": [asdict(t) | {"ratio": t.ratio} for t in timed],
            "operators": [asdict(o) for o in counted],
        }
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    if missed:
        raise SystemExit("; ".join(missed))


if __name__ == "__main__":
    main()
