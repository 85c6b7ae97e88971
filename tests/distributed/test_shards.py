"""Matrices cut among ranks in every number of rows, over meshes of every shape."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dmuon
from dmuon.newton_schulz import orthogonalize, resolve_coefficients
from tests.support.parity import (
    LR,
    Spec,
    check,
    check_parity,
    fsdp_specs,
    full_tensor,
    parity_body,
    seeded,
)


def per_shard_error(shape: tuple[int, int], world_size: int) -> float:
    """How far orthogonalizing each shard by itself is from orthogonalizing the matrix."""
    coefficients = resolve_coefficients("original", 5)
    matrix = seeded(shape, 0)
    whole = orthogonalize(matrix, coefficients=coefficients)
    shards = [orthogonalize(s, coefficients=coefficients) for s in matrix.chunk(world_size)]
    return ((torch.cat(shards) - whole).norm() / whole.norm()).item()


@pytest.mark.parametrize("world_size", [2, 4])
def test_r12_update_is_that_of_the_full_matrix_and_not_of_its_shards(run_ranks, world_size):
    assert per_shard_error((16, 16), world_size) > 0.3
    check_parity(run_ranks, world_size, fsdp_specs(world_size, (16, 16), (8, 16), (16, 8)))


@pytest.mark.parametrize(("shape", "world_size"), [((9, 8), 2), ((9, 8), 4), ((18, 32), 4)])
def test_r13_rows_need_not_divide_among_ranks(run_ranks, shape, world_size):
    check_parity(run_ranks, world_size, fsdp_specs(world_size, shape))


@pytest.mark.parametrize("shape", [(5, 7), (3, 9), (1, 8)])
def test_r14_some_ranks_may_store_no_row(run_ranks, shape):
    check_parity(run_ranks, 4, fsdp_specs(4, shape))
    check_parity(run_ranks, 4, fsdp_specs(4, shape, (8, 8), shape), bucket_cap_mb=1e-5)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("num_matrices", [1, 3, 5, 7])
def test_r15_number_of_matrices_need_not_relate_to_that_of_ranks(
    run_ranks, num_matrices, world_size
):
    check_parity(run_ranks, world_size, fsdp_specs(world_size, *[(4, 4)] * num_matrices))


def test_r20_hybrid_replicas_share_the_work_and_stay_bit_equal(run_ranks):
    layout = {"mesh": (2, 2), "placements": (Replicate(), Shard(0))}
    specs = [Spec(shape, **layout) for shape in [(6, 4), (6, 4), (4, 6), (7, 3)]]
    outcomes = run_ranks(4, parity_body, specs, {})
    check(outcomes)
    assert [outcome.ns_matrices for outcome in outcomes] == [1, 1, 1, 1]


@settings(max_examples=10)
@given(
    world_size=st.integers(1, 4),
    shapes=st.lists(
        st.one_of(
            st.tuples(st.integers(1, 12), st.integers(1, 12)),
            st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
        ),
        min_size=1,
        max_size=6,
    ),
    nesterov=st.booleans(),
    bucket_cap_mb=st.sampled_from([64.0, 1e-4]),
)
def test_fsdp_weights_equal_those_of_one_process(
    run_ranks, world_size, shapes, nesterov, bucket_cap_mb
):
    muon = {"nesterov": nesterov, "bucket_cap_mb": bucket_cap_mb}
    check_parity(run_ranks, world_size, fsdp_specs(world_size, *shapes), **muon)


def test_r30_meshes_of_two_axes_and_groups_of_one_rank_work(run_ranks):
    results = run_ranks(4, meshes_body)
    for weights in results:
        for found, first in zip(weights, results[0], strict=True):
            assert torch.equal(found, first)


def meshes_body():
    """Train on a 2 x 2 mesh, on groups of one rank, and on both axes' own meshes."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))
    thin = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("all", "one"))
    alone = [dist.new_group([rank]) for rank in range(world_size)][dist.get_rank()]
    full = seeded((6, 4), 0)
    params = {
        "grid": distribute_tensor(full, mesh, [Shard(0), Shard(1)], src_data_rank=None),
        "rows": distribute_tensor(full, mesh["rows"], [Shard(0)], src_data_rank=None),
        "cols": distribute_tensor(full, mesh["cols"], [Shard(1)], src_data_rank=None),
        "thin": distribute_tensor(full, thin, [Shard(0), Shard(0)], src_data_rank=None),
        "one": distribute_tensor(full, thin["one"], [Shard(0)], src_data_rank=None),
        "plain": full.clone(),
    }
    params = {name: nn.Parameter(p) for name, p in params.items()}
    optimizer = dmuon.Muon(list(params.items()), lr=LR, process_group=alone)
    for step in range(2):
        for p in params.values():
            grad = seeded((6, 4), 1, step)
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = grad
        optimizer.step()
    weights = [full_tensor(p) for p in params.values()]
    for weight in weights:
        torch.testing.assert_close(weight, weights[-1], rtol=0, atol=1e-5 * LR)
    return weights


def test_parameters_of_meshes_that_leave_out_ranks(run_ranks):
    # Ranks 2 and 3 store nothing of the first and third parameter, and do not wait for others.
    specs = [
        Spec((6, 4), (2,), (Shard(0),)),
        Spec((5, 8), (4,), (Shard(0),)),
        Spec((3, 3), (1,), (Replicate(),)),
    ]
    check_parity(run_ranks, 4, specs)
    check_parity(run_ranks, 4, specs, bucket_cap_mb=1e-5)


def test_r31_one_rank_group_equals_no_group(run_ranks):
    shapes = [(6, 4), (4, 9), (2, 3, 4)]
    for specs, muon in [
        ([Spec(shape) for shape in shapes], {"process_group": "world"}),
        ([Spec(shape) for shape in shapes], {"process_group": "world", "shard_state": True}),
        (fsdp_specs(1, *shapes), {}),
    ]:
        (outcome,) = run_ranks(1, parity_body, specs, muon)
        assert outcome.errors == [0.0] * len(shapes)
        assert (outcome.bytes_sent, outcome.ns_matrices) == (0, 4)
