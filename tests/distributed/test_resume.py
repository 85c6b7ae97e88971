"""A run that is saved and resumed ends with the bits of one that never stopped."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dmuon
from tests.distributed.test_checkpoint import load, save
from tests.support.layout_cases import CASES
from tests.support.parity import LR, Spec, meshes_of, seeded


def build(specs, muon, seed, lr=LR):
    """Build a fresh model with its optimizer; the last parameter never gets a gradient."""
    meshes, model = meshes_of(specs), nn.Module()
    for i, spec in enumerate(specs):
        values = seeded(spec.shape, seed, i).to(spec.dtype)
        if spec.mesh is not None:
            mesh = meshes[spec.mesh]
            values = distribute_tensor(values, mesh, spec.placements, src_data_rank=None)
        model.register_parameter(f"p{i}", nn.Parameter(values))
    groups = {}
    for named, spec in zip(model.named_parameters(), specs, strict=True):
        key = repr((spec.options, spec.shape if spec.options else None))
        groups.setdefault(key, {"params": [], **spec.options})["params"].append(named)
    return model, dmuon.Muon([*groups.values()], lr=lr, **muon)


def train(model, optimizer, steps):
    for step in steps:
        for i, p in enumerate([*model.parameters()][:-1]):
            grad = seeded(tuple(p.shape), 1000 + step, i).to(p.dtype)
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = grad
        optimizer.step()
        optimizer.zero_grad()


def shards(model, optimizer):
    """Every tensor of this rank that training changes."""
    tensors = {}
    for name, p in model.named_parameters():
        tensors[name] = p.detach()
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state[p].items()}
    return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def resume(specs, muon, directory):
    if "process_group" in muon:
        muon = {**muon, "process_group": dist.group.WORLD}
    model, optimizer = build(specs, muon, seed=1)
    train(model, optimizer, range(6))

    interrupted = build(specs, muon, seed=1)
    train(*interrupted, range(3))
    save(directory, *interrupted)
    # Another seed and learning rate: what the checkpoint lacks would show.
    resumed = build(specs, muon, seed=2, lr=7.0)
    load(directory, *resumed)
    train(*resumed, range(3, 6))

    found, expected = shards(*resumed), shards(model, optimizer)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype, name


def specs_of(case, *dtypes):
    """Every parameter in each dtype, a bias for AdamW, and one that never gets a gradient."""
    plain = all(spec.mesh is None for spec in case.specs)
    layout = {} if plain else {"mesh": (case.world_size,), "placements": (Shard(0),)}
    bias = Spec((7,), **layout, options={"use_muon": False})
    typed = [replace(spec, dtype=dtype) for dtype in dtypes for spec in (*case.specs, bias)]
    return [*typed, Spec((4, 6), **layout)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(run_ranks, tmp_path, case):
    # R53: lazily made state was no part of the load template, and momentum restarted from zero.
    specs = specs_of(case, torch.float32, torch.bfloat16)
    run_ranks(case.world_size, resume, specs, case.muon, tmp_path)


# Rows that follow the rows of a weight, are replicated over its columns, or lie side by side.
WITH_ROWS = ["FSDP2, uneven and empty shards", "HSDP, Shard(1)", "DDP, sharded state"]
WITH_ROWS += ["FSDP x TP, column-parallel", "experts, Shard(2)", "EP x FSDP, Shard(1)"]
WITH_ROWS += ["convolutions, inner dims", "heads on rows and columns"]
WITH_ROWS += ["several meshes over other ranks"]


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in WITH_ROWS], ids=lambda case: case.name
)
def test_normuon_resumes_bit_exactly(run_ranks, tmp_path, case):
    muon = {**case.muon, "algorithm": "normuon"}
    specs = specs_of(case, torch.float32, torch.bfloat16)
    run_ranks(case.world_size, resume, specs, muon, tmp_path)


WITH_MASTERS = ["FSDP2, uneven and empty shards", "HSDP 2x2", "DDP, sharded state"]
WITH_MASTERS += ["FSDP x TP, column-parallel", "EP x FSDP, Shard(1)"]


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in WITH_MASTERS], ids=lambda case: case.name
)
def test_master_weights_resume_bit_exactly(run_ranks, tmp_path, case):
    muon = {**case.muon, "master_weights": True}
    run_ranks(case.world_size, resume, specs_of(case, torch.bfloat16), muon, tmp_path)
