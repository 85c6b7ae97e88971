"""Plans are the same on all ranks, or all ranks that are affected say where they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dmuon
from tests.support.parity import (
    LR,
    check_parity,
    fsdp_specs,
    full_tensor,
    seeded,
)

BFLOAT16 = torch.bfloat16


def late_group_of_some_ranks_body():
    world, pair = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2,))

    def parameter(mesh, *key):
        return nn.Parameter(distribute_tensor(seeded((6, 4), *key), mesh, [Shard(0)]))

    def step_all(parameters, meshes, step):
        for i, (p, mesh) in enumerate(zip(parameters, meshes, strict=True)):
            p.grad = distribute_tensor(seeded((6, 4), step, i), mesh, [Shard(0)])
        optimizer.step()

    shared, late = parameter(world, 1), parameter(pair, 2)
    optimizer = dmuon.Muon([("shared", shared)], lr=LR)
    step_all([shared], [world], 0)
    both = dist.get_rank() < 2
    if both:
        optimizer.add_param_group({"params": [("late", late)]})
    step_all([shared, late][: 1 + both], [world, pair][: 1 + both], 1)
    return shared.full_tensor().detach(), optimizer.stats.ns_matrices


def test_some_ranks_may_add_what_only_they_share(run_ranks):
    # Ranks 2 and 3 do not plan anew, so the others must not wait for them.
    outcomes = run_ranks(4, late_group_of_some_ranks_body)
    assert sum(ns_matrices for _, ns_matrices in outcomes) == 2
    assert all(torch.equal(weight, outcomes[0][0]) for weight, _ in outcomes)


def test_r28_mixed_dtypes_have_the_same_owners_on_every_rank(run_ranks):
    specs = fsdp_specs(2, *[(8, 8)] * 3, dtype=BFLOAT16) + fsdp_specs(2, *[(6, 6)] * 2)
    maps = run_ranks(2, owners_body, specs)
    assert maps[0] == maps[1]
    assert maps[0][0] == maps[0][1]
    assert len(maps[0][0]) == 5
    check_parity(run_ranks, 2, specs)


def owners_body(specs):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [
        nn.Parameter(distribute_tensor(seeded(s.shape, i).to(s.dtype), mesh, s.placements))
        for i, s in enumerate(specs)
    ]
    optimizer = dmuon.Muon([(f"p{i}", p) for i, p in enumerate(params)])
    owners = {row.parameter: row.owners for row in optimizer.report().rows}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, owners)
    return gathered


def test_parameters_may_come_in_another_order_on_every_rank(run_ranks):
    results = run_ranks(3, shuffled_body)
    for weights in results:
        for name, weight in weights.items():
            assert torch.equal(weight, results[0][name])
    for name, weight in shuffled_reference().items():
        torch.testing.assert_close(results[0][name], weight, rtol=0, atol=1e-5 * LR)


SHUFFLED = {"a": (6, 4), "b": (4, 6), "c": (5, 5), "d": (6, 4), "e": (3, 8)}


def train_named(params):
    optimizer = dmuon.Muon(list(params.items()), lr=LR)
    for step in range(2):
        for i, name in enumerate(SHUFFLED):
            grad = seeded(SHUFFLED[name], step, i)
            p = params[name]
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = grad
        optimizer.step()
    return {name: full_tensor(params[name]).clone() for name in SHUFFLED}


def shuffled_reference():
    return train_named({name: nn.Parameter(seeded(s, 9)) for name, s in SHUFFLED.items()})


def shuffled_body():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = {
        name: nn.Parameter(
            distribute_tensor(seeded(shape, 9), mesh, [Shard(0)], src_data_rank=None)
        )
        for name, shape in SHUFFLED.items()
    }
    names = list(SHUFFLED)
    first = dist.get_rank() % len(names)
    return train_named({name: params[name] for name in names[first:] + names[:first]})


DIFFERENCES = {
    "shape": {"shape": (4, 6)},
    "split": {"split": (2, 2)},
    "ns_steps": {"ns_steps": 4},
    "ns_dtype": {"ns_dtype": torch.bfloat16},
    "sharded dim": {"dim": 1},
    "name": {"name": "layers.1.other"},
    "algorithm": {"algorithm": "adamw"},
    "AdamW parameter": {"bias": "layers.1.bias"},
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_differ_all_raise_an_error_that_names_the_parameter(
    run_ranks, difference, world_size
):
    # A parameter that differs moves the owners of others, and those were named;
    # an AdamW parameter of one rank only was a hang.
    messages = run_ranks(world_size, mismatch_body, DIFFERENCES[difference], timeout=15)
    for message in messages:
        assert message.startswith("layers.1.")
        assert "ranks disagree" in message
        for rank in range(world_size):
            assert f"  rank {rank}: " in message
    assert len(set(messages)) == 1


def mismatch_body(difference):
    """Step with options that differ on the last rank; return what is raised."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    options = dict(difference) if dist.get_rank() == world_size - 1 else {}

    def ones(*shape, dim=0):
        tensor = distribute_tensor(torch.ones(shape), mesh, [Shard(dim)], src_data_rank=None)
        return nn.Parameter(tensor)

    second = ones(*options.pop("shape", (4, 4)), dim=options.pop("dim", 0))
    named = [("layers.0.weight", ones(4, 4)), (options.pop("name", "layers.1.weight"), second)]
    groups = [{"params": named[:1]}]
    if bias := options.pop("bias", None):
        named.append((bias, ones(4)))
        groups.append({"params": named[2:], "use_muon": False})
    groups.append({"params": named[1:2], **options})
    optimizer = dmuon.Muon(groups)
    for _, p in named:
        p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_share_another_parameter_with_those_that_differ_raise_too(run_ranks):
    # They waited for the ranks that had raised.
    messages = run_ranks(4, partial_mismatch_body, timeout=15)
    assert messages[0].startswith("pair: ranks disagree")
    assert len(set(messages)) == 1


def partial_mismatch_body():
    rank = dist.get_rank()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "pair"))["pair"]
    world = init_device_mesh("cpu", (4,))
    params = {
        "world": distribute_tensor(torch.ones(8, 4), world, [Shard(0)], src_data_rank=None),
        "pair": distribute_tensor(torch.ones(4, 4), pairs, [Shard(0)], src_data_rank=None),
    }
    named = [(name, nn.Parameter(tensor)) for name, tensor in params.items()]
    split = (1, 3) if rank == 1 else None
    optimizer = dmuon.Muon([{"params": named[:1]}, {"params": named[1:], "split": split}])
    for _, p in named:
        p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""
