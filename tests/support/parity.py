"""The property that most distributed tests assert: every layout gives one process's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

import dmuon

LR = 0.02


@dataclass(frozen=True)
class Spec:
    """One parameter of a test: its global shape and how it is laid out.

    `mesh` is the shape of the device mesh; None is a plain tensor, replicated if the optimizer has
    a process group. `options` go to its parameter group.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...] | None = None
    placements: tuple[Placement, ...] = ()
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What one rank saw; of parameters whole, where it is part of their mesh, and of their state.

    `state_errors` are relative to the largest entry of a state.
    """

    weights: list[Tensor | None]
    errors: list[float]
    states: list[Tensor | None]
    state_errors: list[float]
    ns_matrices: int
    num_matrices: int
    bytes_sent: int
    planned_bytes: int
    planned_runs: int


def full_tensor(tensor: Tensor) -> Tensor | None:
    """The whole tensor, on every rank of its mesh."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    in_mesh = tensor.device_mesh.get_coordinate() is not None
    return tensor.detach().full_tensor() if in_mesh else None


def meshes_of(specs: Sequence[Spec]) -> dict[tuple[int, ...], DeviceMesh]:
    """One mesh per shape, over the first ranks."""
    shapes = dict.fromkeys(spec.mesh for spec in specs if spec.mesh is not None)
    return {shape: init_device_mesh("cpu", shape) for shape in shapes}


def seeded(shape: tuple[int, ...], *key: int) -> Tensor:
    """Random float32 values that depend on `key` alone."""
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.randn(shape, generator=generator)


def run_parity(
    specs: Sequence[Spec], *, steps: int = 3, muon: Mapping[str, Any] | None = None
) -> Outcome:
    """Train the same parameters laid out as `specs` say and whole; compare.

    Runs on every rank of the default group.
    """
    meshes = meshes_of(specs)

    def lay_out(full: Tensor, spec: Spec) -> Tensor:
        if spec.mesh is None:
            return full.clone()
        # Every rank has the whole tensor, and a scatter refuses uneven strided shards.
        mesh, placements = meshes[spec.mesh], spec.placements
        return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)

    muon = dict(muon or {})
    local_only = {
        key: value for key, value in muon.items() if key not in ("process_group", "shard_state")
    }
    if muon.get("process_group") == "world":
        muon["process_group"] = dist.group.WORLD
    initial = [seeded(spec.shape, i).to(spec.dtype) for i, spec in enumerate(specs)]
    sharded = [nn.Parameter(lay_out(w, s)) for w, s in zip(initial, specs, strict=True)]
    whole = [nn.Parameter(w.clone()) for w in initial]
    optimizer = dmuon.Muon(_groups(sharded, specs), lr=LR, **muon)
    reference = dmuon.Muon(_groups(whole, specs), lr=LR, **local_only)
    for step in range(steps):
        for i, (spec, p, w) in enumerate(zip(specs, sharded, whole, strict=True)):
            grad = seeded(spec.shape, 1000 + step, i).to(spec.dtype)
            p.grad, w.grad = lay_out(grad, spec), grad.clone()
        optimizer.step()
        reference.step()
    weights = [full_tensor(p) for p in sharded]
    names = [[*reference.state[w]] for w in whole]
    assert names == [[*optimizer.state[p]] for p in sharded]
    pairs = [
        (full_tensor(optimizer.state[p][name]), reference.state[w][name])
        for p, w, keys in zip(sharded, whole, names, strict=True)
        for name in keys
    ]
    report = optimizer.report()
    return Outcome(
        weights=weights,
        errors=[
            (a.float() - b.detach().float()).abs().max().item()
            for a, b in zip(weights, whole, strict=True)
            if a is not None
        ],
        states=[state for state, _ in pairs],
        state_errors=[
            ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()
            for a, b in pairs
            if a is not None
        ],
        ns_matrices=optimizer.stats.ns_matrices,
        num_matrices=reference.stats.ns_matrices,
        bytes_sent=optimizer.stats.bytes_sent,
        planned_bytes=report.bytes_sent.get(dist.get_rank(), 0),
        planned_runs=report.num_orthogonalized.get(dist.get_rank(), 0),
    )


def _groups(params: Sequence[Tensor], specs: Sequence[Spec]) -> list[dict[str, Any]]:
    return [
        {"params": [(f"p{i}", p)], **spec.options}
        for i, (p, spec) in enumerate(zip(params, specs, strict=True))
    ]


def check(
    outcomes: Sequence[Outcome], *, tolerance: float = 1e-5, runs_per_matrix: int = 1
) -> None:
    """Assert the property over what all ranks returned."""
    for rank, outcome in enumerate(outcomes):
        assert max(outcome.errors) <= tolerance * LR, (rank, outcome.errors)
        assert max(outcome.state_errors) <= tolerance, (rank, outcome.state_errors)
        assert outcome.bytes_sent == outcome.planned_bytes
        assert outcome.ns_matrices == outcome.planned_runs
        tensors, firsts = ((*o.weights, *o.states) for o in (outcome, outcomes[0]))
        for mine, first in zip(tensors, firsts, strict=True):
            assert mine is None or torch.equal(mine, first), "replicas differ"
    runs = sum(o.ns_matrices for o in outcomes)
    assert runs == runs_per_matrix * outcomes[0].num_matrices


def fsdp_specs(world_size: int, *shapes: tuple[int, ...], **options: Any) -> list[Spec]:
    """Parameters as FSDP2 shards them over all ranks."""
    return [Spec(shape, (world_size,), (Shard(0),), **options) for shape in shapes]


def parity_body(specs: Sequence[Spec], muon: Mapping[str, Any]) -> Outcome:
    """Rank body: `run_parity`."""
    return run_parity(specs, muon=muon)


def check_parity(
    run_ranks: Callable[..., list[Outcome]], world_size: int, specs: Sequence[Spec], **muon: Any
) -> None:
    """Assert the property for parameters laid out as `specs` say."""
    check(run_ranks(world_size, parity_body, specs, muon))
