"""Cases that broke other Muon implementations, on real ranks.

Case numbers (R08, R12, ...) are those of public reports.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.newton_schulz import orthogonalize, resolve_coefficients
from tests.support.parity import LR, Spec, check, full_tensor, run_parity, seeded

BFLOAT16 = torch.bfloat16


def fsdp(world_size: int, *shapes: tuple[int, ...], **options: Any) -> list[Spec]:
    """Parameters as FSDP2 shards them over all ranks."""
    return [Spec(shape, (world_size,), (Shard(0),), **options) for shape in shapes]


def check_parity(run_ranks, world_size: int, specs: Sequence[Spec], **muon: Any) -> None:
    check(run_ranks(world_size, parity_body, specs, muon))


def parity_body(specs, muon):
    return run_parity(specs, muon=muon)


# Shards: R12 to R15, R20


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
    check_parity(run_ranks, world_size, fsdp(world_size, (16, 16), (8, 16), (16, 8)))


@pytest.mark.parametrize(("shape", "world_size"), [((9, 8), 2), ((9, 8), 4), ((18, 32), 4)])
def test_r13_rows_need_not_divide_among_ranks(run_ranks, shape, world_size):
    check_parity(run_ranks, world_size, fsdp(world_size, shape))


@pytest.mark.parametrize("shape", [(5, 7), (3, 9), (1, 8)])
def test_r14_some_ranks_may_store_no_row(run_ranks, shape):
    check_parity(run_ranks, 4, fsdp(4, shape))
    check_parity(run_ranks, 4, fsdp(4, shape, (8, 8), shape), bucket_cap_mb=1e-5)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("num_matrices", [1, 3, 5, 7])
def test_r15_number_of_matrices_need_not_relate_to_that_of_ranks(
    run_ranks, num_matrices, world_size
):
    check_parity(run_ranks, world_size, fsdp(world_size, *[(4, 4)] * num_matrices))


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
    check_parity(run_ranks, world_size, fsdp(world_size, *shapes), **muon)


# Wrapped models: R08, R18, mixed precision


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 9, bias=False)])
        self.norm = nn.LayerNorm(9)
        self.output = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.output(self.norm(x))


def shard_tiny(model: Tiny, mesh: DeviceMesh | None = None, **options: Any) -> Tiny:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def seeded_tiny() -> Tiny:
    torch.manual_seed(1)
    return Tiny()


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return seeded((4, 6), 1, rank, step), seeded((4, 5), 2, rank, step)


def backward(model: nn.Module, ranks: Sequence[int], step: int) -> None:
    """Gradients of the loss averaged over the batches of `ranks`."""
    for rank in ranks:
        inputs, targets = batch_of(rank, step)
        loss = nn.functional.mse_loss(model(inputs), targets)
        (loss / len(ranks)).backward()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): full_tensor(p).clone() for name, p in model.named_parameters()
    }


def test_r08_model_built_on_meta_orthogonalizes_every_matrix_and_all_weights_move(run_ranks):
    results = run_ranks(2, meta_body)
    assert [num_matrices for num_matrices, _, _ in results] == [2, 2]
    assert sum(orthogonalized for _, orthogonalized, _ in results) == 2
    assert [unmoved for _, _, unmoved in results] == [[], []]


def meta_body():
    with torch.device("meta"):
        model = shard_tiny(Tiny())
    model.to_empty(device="cpu")
    for i, p in enumerate(model.parameters()):
        shard = p.to_local()
        shard.detach().copy_(seeded(shard.shape, i))
    optimizer = dmuon.Muon(dmuon.param_groups(model), lr=LR)
    before = weights_of(model)
    backward(model, [dist.get_rank()], 0)
    optimizer.step()
    after = weights_of(model)
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    return optimizer.report().num_matrices, optimizer.stats.ns_matrices, unmoved


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("wrapper", ["ddp", "ddp, sharded state", "fsdp2"])
def test_r18_owners_see_the_gradient_averaged_over_all_data(run_ranks, wrapper, world_size):
    weights = run_ranks(world_size, different_data_body, wrapper)
    # Different sums round gradients differently, and Newton-Schulz magnifies the smallest
    # singular values about 500 times: 1e-4 of a step, where a rank's own data would give 1.
    expected = one_process_weights(world_size)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[0][name], weight, rtol=0, atol=1e-4 * LR, msg=name)
        for other in weights[1:]:
            assert torch.equal(other[name], weights[0][name])
    own_data = one_process_weights(1)
    assert (own_data["layers.1.weight"] - expected["layers.1.weight"]).abs().max() > 0.1 * LR


def one_process_weights(num_batches):
    model = seeded_tiny()
    optimizer = dmuon.Muon(dmuon.param_groups(model), lr=LR)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, range(num_batches), step)
        optimizer.step()
    return weights_of(model)


def different_data_body(wrapper):
    model: nn.Module = seeded_tiny()
    options = {}
    if wrapper == "fsdp2":
        model = shard_tiny(model)
    else:
        model = DistributedDataParallel(model)
        options["process_group"] = dist.group.WORLD
        options["shard_state"] = wrapper == "ddp, sharded state"
    optimizer = dmuon.Muon(dmuon.param_groups(model), lr=LR, **options)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, [dist.get_rank()], step)
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("policy", ["mixed precision", "bfloat16", "both dtypes"])
def test_fsdp2_in_lower_precision_equals_one_process_with_the_same_gradients(run_ranks, policy):
    for errors, sharded, whole in run_ranks(2, precision_body, policy):
        assert sharded == whole
        for name, (error, dtype) in errors.items():
            # A weight in bfloat16 may round the other way, by one unit in the last place.
            assert error <= (1e-5 * LR if dtype == torch.float32 else 2**-8), name


def precision_body(policy):
    model = seeded_tiny()
    if policy == "bfloat16":
        model.to(BFLOAT16)
    elif policy == "both dtypes":
        model.layers[1].to(BFLOAT16)
    whole = copy.deepcopy(model)
    mp_policy = MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=torch.float32)
    options = {} if policy == "bfloat16" else {"mp_policy": mp_policy}
    shard_tiny(model, **options)
    optimizer = dmuon.Muon(dmuon.param_groups(model), lr=LR)
    reference = dmuon.Muon(dmuon.param_groups(whole), lr=LR)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch_of(dist.get_rank(), step)
        nn.functional.mse_loss(model(inputs.to(BFLOAT16)), targets.to(BFLOAT16)).backward()
        for p, w in zip(model.parameters(), whole.parameters(), strict=True):
            w.grad = full_tensor(p.grad).clone()
        optimizer.step()
        reference.step()
    names = dict(whole.named_parameters())
    errors = {
        name: ((weight.float() - names[name].detach().float()).abs().max().item(), weight.dtype)
        for name, weight in weights_of(model).items()
    }
    dtypes = [
        {
            name: str(opt.state[p]["momentum_buffer"].dtype)
            for name, p in m.named_parameters()
            if "momentum_buffer" in opt.state[p]
        }
        for m, opt in ((model, optimizer), (whole, reference))
    ]
    return errors, *dtypes


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


# Owners: R26, R28, plans that differ


def test_r26_one_matrix_on_four_ranks(run_ranks):
    outcomes = run_ranks(4, parity_body, fsdp(4, (4, 4)), {})
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


def test_r28_mixed_dtypes_have_the_same_owners_on_every_rank(run_ranks):
    specs = fsdp(2, *[(8, 8)] * 3, dtype=BFLOAT16) + fsdp(2, *[(6, 6)] * 2)
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
    assert messages[0].startswith("pair[0:1, 0:4]: ranks disagree")
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


# Groups and meshes: R30, R31


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
        (fsdp(1, *shapes), {}),
    ]:
        (outcome,) = run_ranks(1, parity_body, specs, muon)
        assert outcome.errors == [0.0] * len(shapes)
        assert (outcome.bytes_sent, outcome.ns_matrices) == (0, 4)
