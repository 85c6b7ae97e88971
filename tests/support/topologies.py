"""The ways in which the checkpoint tests lay out one small model over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import dmuon
from tests.support.parity import LR, seeded

SHAPES = {
    "square": (8, 8),
    "uneven": (5, 7),
    "short": (3, 9),
    "experts": (3, 4, 6),
    "fused": (12, 8),
    "bias": (7,),
}
ROUTES: Mapping[str, Mapping[str, Any]] = {
    "fused": {"split": (8, 2, 2)},
    "bias": {"use_muon": False, "lr": LR / 10},
}
COLUMN, ROW = Shard(0), Shard(1)


class Weights(nn.Module):
    """Parameters without a forward pass; the tests set their gradients."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(seeded(shape, seed, i).to(dtype)))


def lay_out(
    model: nn.Module, mesh: Any, placements: Callable[[str], tuple[Placement, ...]]
) -> nn.Module:
    """Replace the parameters by DTensors."""
    for name, p in [*model.named_parameters(recurse=False)]:
        whole = p.detach().clone()
        laid_out = distribute_tensor(whole, mesh, placements(name), src_data_rank=None)
        model.register_parameter(name, nn.Parameter(laid_out))
    return model


def plain(model: nn.Module) -> nn.Module:
    return model


def fsdp(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def tp_placements(name: str) -> tuple[Placement, ...]:
    named = {"square": COLUMN, "fused": COLUMN, "uneven": ROW, "experts": Shard(2)}
    return (named.get(name, Replicate()),)


def tp(model: nn.Module) -> nn.Module:
    return lay_out(model, init_device_mesh("cpu", (2,)), tp_placements)


def tp_fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(lay_out(model, mesh["tp"], tp_placements), mesh=mesh["dp"])


def ep(model: nn.Module) -> nn.Module:
    """Whole experts on each rank, one rank without any; the rest as FSDP does."""
    return lay_out(model, init_device_mesh("cpu", (dist.get_world_size(),)), lambda _: (Shard(0),))


def ep_fsdp(model: nn.Module) -> nn.Module:
    return lay_out(
        model,
        init_device_mesh("cpu", (2, 2)),
        lambda name: (Shard(1), Shard(0)) if name == "experts" else (Replicate(), Shard(0)),
    )


@dataclass(frozen=True)
class Topology:
    """A number of ranks, how they hold the model, and what the optimizer is told."""

    world_size: int
    lay_out: Callable[[nn.Module], nn.Module] = plain
    muon: Mapping[str, Any] = field(default_factory=dict)


DDP = {"process_group": "world"}
TOPOLOGIES = {
    "one process": Topology(1),
    "FSDP2 on 1": Topology(1, fsdp),
    "FSDP2 on 2": Topology(2, fsdp),
    "FSDP2 on 3": Topology(3, fsdp),
    "FSDP2 on 4": Topology(4, fsdp),
    "HSDP": Topology(4, hsdp),
    "TP": Topology(2, tp),
    "TP x FSDP2": Topology(4, tp_fsdp),
    "EP": Topology(4, ep),
    "EP x FSDP2": Topology(4, ep_fsdp),
    "DDP on 2": Topology(2, plain, DDP),
    "DDP on 3, sharded state": Topology(3, plain, {**DDP, "shard_state": True}),
    "DDP on 4, sharded state": Topology(4, plain, {**DDP, "shard_state": True}),
}


def build(
    topology: Topology, seed: int, *, dtype: torch.dtype = torch.float32, **muon: Any
) -> tuple[nn.Module, dmuon.Muon]:
    """Build a fresh model and its optimizer."""
    model = topology.lay_out(Weights(seed, dtype))
    options = {**topology.muon, **muon}
    if "process_group" in options:
        options["process_group"] = dist.group.WORLD
    groups: dict[str, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        key = name if name in ROUTES else ""
        groups.setdefault(key, {"params": [], **ROUTES.get(name, {})})["params"].append((name, p))
    return model, dmuon.Muon([*groups.values()], **{"lr": LR, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take steps whose gradients depend on the step's number alone."""
    for step in steps:
        for i, p in enumerate(model.parameters()):
            grad = seeded(tuple(p.shape), 1000 + step, i).to(p.dtype)
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = grad
        optimizer.step()
        optimizer.zero_grad()


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of whole tensors. Collective."""
    return {
        name: (t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()).clone()
        for name, t in tensors.items()
    }


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole weights by name. Collective."""
    return whole(dict(model.named_parameters()))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole tensors of optimizer state, by name. Collective."""
    return whole(
        {
            f"{name}.{key}": value
            for name, p in model.named_parameters()
            for key, value in sorted(optimizer.state[p].items())
        }
    )


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert equality bit for bit."""
    assert found.keys() == expected.keys()
    different = [n for n in expected if not torch.equal(found[n], expected[n])]
    assert not different
