"""Pipeline stages, which differ in what they hold."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from tests.support.parity import (
    LR,
    check,
    fsdp_specs,
    parity_body,
    seeded,
)
from tests.support.wrapped import weights_of


def tied_copies_body():
    """Each rank is a pipeline stage with its own copy of the embedding."""
    torch.manual_seed(1)
    embedding = nn.Embedding(16, 4)
    torch.manual_seed(2 + dist.get_rank())
    model = nn.ModuleDict({"tok": embedding, "layer": nn.Linear(4, 4)})
    if dist.get_rank() == 1:
        model["lm_head"] = nn.Linear(4, 16, bias=False)
        model["lm_head"].weight = embedding.weight
    groups = dmuon.param_groups(model)
    rule = next(g["rule"] for g in groups if not g["use_muon"])
    optimizer = dmuon.Muon(groups, lr=LR)
    for step in range(3):
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = seeded(tuple(parameter.shape), dist.get_rank(), step, i)
        dist.all_reduce(embedding.weight.grad)
        optimizer.step()
    return rule, embedding.weight.detach()


def test_r02_copies_of_an_embedding_on_two_stages_stay_bit_equal(run_ranks):
    (rule, weight), (other_rule, other_weight) = run_ranks(2, tied_copies_body)
    assert rule == other_rule == "embedding"
    assert torch.equal(weight, other_weight)


def test_r26_one_matrix_on_four_ranks(run_ranks):
    outcomes = run_ranks(4, parity_body, fsdp_specs(4, (4, 4)), {})
    check(outcomes)
    assert sorted(outcome.ns_matrices for outcome in outcomes) == [0, 0, 0, 1]


@pytest.mark.parametrize("world_size", [2, 4])
def test_r26_pipeline_stage_without_matrices_trains(run_ranks, world_size):
    results = run_ranks(world_size, stages_body)
    half = world_size // 2
    for stage, ranks in enumerate((range(half), range(half, world_size))):
        for rank in ranks:
            num_matrices, moved = results[rank]
            assert all(moved.values())
            assert num_matrices == (2 if stage == 0 else 0)
    assert set(results[-1][1]) == {"0.weight", "1.weight", "1.bias"}


def stages_body():
    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("stage", "data"))
    torch.manual_seed(1)
    if mesh.get_local_rank("stage") == 0:
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6, bias=False))
        inputs = seeded((5, 6), 1)
    else:
        model = nn.Sequential(nn.Embedding(16, 4), nn.LayerNorm(4))
        inputs = torch.arange(5)
    fully_shard(model, mesh=mesh["data"])
    optimizer = dmuon.Muon(dmuon.param_groups(model), lr=LR)
    before = weights_of(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
    after = weights_of(model)
    moved = {name: not torch.equal(before[name], after[name]) for name in before}
    return optimizer.report().num_matrices, moved
