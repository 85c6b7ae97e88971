"""Gradients between backward and step: accumulation, loss scaling, bad and missing gradients."""

import contextlib
import copy
import math
import multiprocessing
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dmuon
from tests.support.loops import tiny_model
from tests.support.parity import full_tensor, seeded
from tests.support.rank_pool import PRELOAD

LR = 0.02
LAYOUTS = {"DDP": 2, "FSDP2": 2, "HSDP": 4, "FSDP2 x TP": 4}
NUM_MATRICES = 2


def wrap(model, layout):
    """Lay a model out; returns it with the process group of its plain parameters."""
    if layout == "DDP":
        return DistributedDataParallel(model), dist.group.WORLD
    if layout == "FSDP2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2,))), None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if layout == "HSDP":
        return fully_shard(model, mesh=mesh), None
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"]), None


def build(layout, **options):
    """A wrapped model and its optimizer: matrices to Muon, biases to AdamW."""
    model, group = wrap(tiny_model(), layout)
    return model, optimizer_of(model, process_group=group, **options)


def optimizer_of(model, **options):
    named = [(n.removeprefix("module."), p) for n, p in model.named_parameters()]
    groups = [
        {"params": [(n, p) for n, p in named if p.ndim > 1]},
        {"params": [(n, p) for n, p in named if p.ndim == 1], "algorithm": "adamw", "lr": 0.01},
    ]
    return dmuon.Muon(groups, lr=LR, **options)


def set_grads(model, step):
    for i, p in enumerate(model.parameters()):
        grad = seeded(tuple(p.shape), step, i)
        if isinstance(p, DTensor):
            grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = grad


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spoil(model, index, value=math.nan):
    """Put a bad element into one gradient, on the first rank that stores any of it."""
    grad = local([*model.parameters()][index].grad)
    if dist.get_rank() == 0:
        grad.view(-1)[0] = value


def snapshot(optimizer):
    """Every local number that a step may change."""
    numbers = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            tensors = [p.detach(), *optimizer.state[p].values()]
            numbers.append([local(t).clone() for t in tensors])
    return numbers


def same_bits(a, b):
    return all(
        torch.equal(x, y) for xs, ys in zip(a, b, strict=True) for x, y in zip(xs, ys, strict=True)
    )


def whole(model):
    return [full_tensor(p).clone() for p in model.parameters()]


def assert_near(a, b, tolerance=1e-5):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * LR)


# Accumulation


@contextlib.contextmanager
def gradient_sync(model, enabled):
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if enabled else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(enabled)
        yield


def accumulate(layout, num_micro_batches):
    """Three steps on 8 samples a rank, in one or several micro batches."""
    model, optimizer = build(layout)
    # Tensor-parallel ranks see the same samples.
    replica = dist.get_rank() // (2 if layout == "FSDP2 x TP" else 1)
    num_ns = 0
    for step in range(3):
        x, y = seeded((8, 6), replica, step), seeded((8, 5), replica, step)
        batches = [*zip(x.chunk(num_micro_batches), y.chunk(num_micro_batches), strict=True)]
        for i, (inputs, targets) in enumerate(batches):
            with gradient_sync(model, i == len(batches) - 1):
                loss = nn.functional.mse_loss(model(inputs), targets) / num_micro_batches
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        num_ns += optimizer.stats.ns_matrices
    return whole(model), num_ns


# torch's, about the output of a row-parallel layer.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_r42_accumulated_micro_batches_equal_one_batch_and_take_one_update(run_ranks, layout):
    at_once = run_ranks(LAYOUTS[layout], accumulate, layout, 1)
    accumulated = run_ranks(LAYOUTS[layout], accumulate, layout, 4)
    for (a, _), (b, _) in zip(at_once, accumulated, strict=True):
        assert_near(a, b)
    assert sum(num_ns for _, num_ns in accumulated) == 3 * NUM_MATRICES


# Loss scaling


def train_with_scaler(layout, bad_step):
    """Three steps with a GradScaler; one element of one gradient of `bad_step` is infinite."""
    holders = {"DDP": (0, 1), "FSDP2": (0,), "HSDP": (0, 2), "FSDP2 x TP": (0,)}[layout]
    model, optimizer = build(layout)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    skipped = []
    for step in range(3):
        x = seeded((4, 6), step)
        scaler.scale(model(x).square().mean()).backward()
        if step == bad_step and dist.get_rank() in holders:
            local(next(model.parameters()).grad).view(-1)[0] = math.inf
        before = snapshot(optimizer)
        scaler.step(optimizer)
        skipped.append(same_bits(before, snapshot(optimizer)))
        scaler.update()
        optimizer.zero_grad()
    return skipped, scaler.get_scale(), whole(model)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_r37_a_step_that_the_scaler_discards_changes_no_bit_on_any_rank(run_ranks, layout):
    for skipped, scale, weights in run_ranks(LAYOUTS[layout], train_with_scaler, layout, 1):
        assert skipped == [False, True, False]
        assert scale == 2.0
        assert all(w.isfinite().all() for w in weights)


def scale_with_experts():
    """Experts of ranks 0, 1 overflow, which ranks 2, 3 do not store; a dense weight is first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
    dense = distribute_tensor(seeded((4, 4), 0), init_device_mesh("cpu", (4,)), [Shard(0)])
    expert = distribute_tensor(seeded((2, 4, 3), 1), mesh["efsdp"], [Shard(1)])
    optimizer = dmuon.Muon([nn.Parameter(dense), nn.Parameter(expert)])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for p in optimizer.param_groups[0]["params"]:
        p.grad = p.detach().clone()
    if dist.get_rank() == 0:
        p.grad.to_local().view(-1)[0] = math.inf
    before = snapshot(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return same_bits(before, snapshot(optimizer)), scaler.get_scale()


def test_all_ranks_discard_a_step_when_the_first_parameter_lies_on_all_of_them(run_ranks):
    assert run_ranks(4, scale_with_experts) == [(True, 2.0)] * 4


def reshard_in_place():
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(seeded((4, 6), 0), mesh, [Shard(0)]))
    optimizer = dmuon.Muon([("w", p)])
    p.grad = p.detach().clone()
    optimizer.step()
    p.grad = None
    torch.utils.swap_tensors(p, nn.Parameter(p.detach().redistribute(placements=[Shard(1)])))
    p.grad = p.detach().clone()
    with pytest.raises(ValueError, match="w: the shape, layout or algorithm"):
        optimizer.step()


def test_a_parameter_resharded_in_place_is_an_error(run_ranks):
    run_ranks(2, reshard_in_place)


def train_scaled_and_clipped():
    results = []
    for scale in (1.0, 1024.0):
        model, optimizer = build("FSDP2")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        norms = []
        for step in range(3):
            scaler.scale(model(seeded((4, 6), step)).square().mean()).backward()
            scaler.unscale_(optimizer)
            norms.append(dmuon.clip_grad_norm_(optimizer, 0.1).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((whole(model), norms))
    (a, norms_a), (b, norms_b) = results
    assert_near(a, b)
    assert norms_a == pytest.approx(norms_b, rel=1e-5)


def test_the_loss_scale_changes_neither_weights_nor_norms(run_ranks):
    run_ranks(2, train_scaled_and_clipped)


# Infinite and NaN gradients without a scaler


def skip_bad_step(layout, index, value):
    """Steps 0, bad, 1 with "skip"; and steps 0, 1 alone."""
    model, optimizer = build(layout, nonfinite="skip")
    reference, expected = build(layout)
    for step in (0, 1):
        set_grads(model, step)
        optimizer.step()
        set_grads(reference, step)
        expected.step()
        if step == 0:
            set_grads(model, 7)
            spoil(model, index, value)
            before = snapshot(optimizer)
            optimizer.step()
            assert same_bits(before, snapshot(optimizer))
            assert optimizer.stats.ns_matrices == 0
    assert same_bits(snapshot(optimizer), snapshot(expected))
    return optimizer.skipped_steps


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("index", "value"), [(0, math.nan), (2, math.inf), (3, -math.inf)])
def test_r37_skip_leaves_everything_as_it_was_on_all_ranks(run_ranks, layout, index, value):
    results = run_ranks(LAYOUTS[layout], skip_bad_step, layout, index, value)
    assert results == [1] * LAYOUTS[layout]


def raise_on_bad_step(layout):
    model, optimizer = build(layout, nonfinite="raise")
    set_grads(model, 0)
    optimizer.step()
    set_grads(model, 7)
    spoil(model, 3)
    spoil(model, 2)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError) as failure:
        optimizer.step()
    assert same_bits(before, snapshot(optimizer))
    set_grads(model, 1)
    optimizer.step()
    assert not same_bits(before, snapshot(optimizer))
    return str(failure.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_raise_names_the_first_parameter_on_all_ranks_and_the_job_can_go_on(run_ranks, layout):
    messages = run_ranks(LAYOUTS[layout], raise_on_bad_step, layout)
    assert set(messages) == {messages[0]}
    assert messages[0].startswith("2.weight: the gradient has an infinite or NaN element")


def raise_for_rank_1():
    model, optimizer = build("FSDP2", nonfinite="raise")
    set_grads(model, 0)
    if dist.get_rank() == 1:
        local([*model.parameters()][1].grad).fill_(math.inf)
    with pytest.raises(RuntimeError, match=r"^0\.bias: the gradient"):
        optimizer.step()


def test_raise_names_a_parameter_that_is_bad_on_a_later_rank_only(run_ranks):
    run_ranks(2, raise_for_rank_1)


def skip_on_sub_meshes(where):
    """A bad gradient in an expert that ranks 0, 1 store alone: ranks 2, 3 must hear of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
    dense = distribute_tensor(seeded((4, 4), 0), init_device_mesh("cpu", (4,)), [Shard(0)])
    expert = distribute_tensor(seeded((2, 4, 3), 1), mesh["efsdp"], [Shard(1)])
    params = [nn.Parameter(expert)] + ([nn.Parameter(dense)] if where == "with dense" else [])
    optimizer = dmuon.Muon(params, nonfinite="skip")
    for bad in (False, True):
        for p in params:
            p.grad = p.detach().clone()
        if bad and dist.get_rank() == 0:
            expert_grad = params[0].grad.to_local()
            expert_grad.view(-1)[0] = math.nan
        before = snapshot(optimizer)
        optimizer.step()
        assert same_bits(before, snapshot(optimizer)) == bad


@pytest.mark.parametrize("where", ["with dense", "experts alone"])
def test_skip_is_agreed_on_by_ranks_that_share_no_bad_parameter(run_ranks, where):
    run_ranks(4, skip_on_sub_meshes, where)


def propagate_bad_step():
    mesh = init_device_mesh("cpu", (2,))
    params = [
        nn.Parameter(distribute_tensor(seeded((4, 6), i), mesh, [Shard(0)])) for i in range(3)
    ]
    optimizer = dmuon.Muon(params)
    for p in params:
        p.grad = p.detach().clone()
    if dist.get_rank() == 0:
        params[1].grad.to_local()[0, 0] = math.inf
    optimizer.step()
    return [p.full_tensor().isfinite().all().item() for p in params]


def test_a_bad_gradient_stays_in_its_own_matrix_by_default(run_ranks):
    assert run_ranks(2, propagate_bad_step) == [[True, False, True]] * 2


def count_collectives(nonfinite):
    model, optimizer = build("FSDP2", nonfinite=nonfinite)
    set_grads(model, 0)
    optimizer.step()
    with CommDebugMode() as collectives:
        optimizer.step()
    return collectives.get_total_counts()


def test_agreement_about_bad_gradients_costs_nothing_by_default_and_one_collective_else(run_ranks):
    default, skip, raise_ = (
        run_ranks(2, count_collectives, nonfinite)[0]
        for nonfinite in ("propagate", "skip", "raise")
    )
    assert default >= 2
    assert skip == raise_ == default + 1


def step_on_rank_0_alone():
    if dist.get_rank() == 0:
        p = nn.Parameter(seeded((4, 3), 0))
        alone = dist.new_group([0], use_local_synchronization=True)
        optimizer = dmuon.Muon([p], nonfinite="skip", nonfinite_group=alone)
        p.grad = torch.full_like(p, math.nan)
        optimizer.step()
        assert optimizer.skipped_steps == 1


def test_an_optimizer_of_one_rank_does_not_wait_for_the_others(run_ranks):
    run_ranks(2, step_on_rank_0_alone)


# Missing gradients


def step_without(layout, absent):
    """Two steps, the second without the gradients of `absent`."""
    model, optimizer = build(layout)
    set_grads(model, 0)
    optimizer.step()
    set_grads(model, 1)
    for i in absent:
        [*model.parameters()][i].grad = None
    before = snapshot(optimizer)
    optimizer.step()
    return [same_bits([a], [b]) for a, b in zip(before, snapshot(optimizer), strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_r16_a_parameter_without_gradient_on_any_rank_is_untouched(run_ranks, layout):
    # Parameters are weight, bias, weight, bias; the snapshot has the weights first.
    for untouched in run_ranks(LAYOUTS[layout], step_without, layout, [2, 1]):
        assert untouched == [False, True, True, False]


def step_with_none_on_rank_0(layout, index):
    """Rank 0 misses a gradient that the others have; and all ranks have zeros on rank 0."""
    results = []
    for missing in (True, False):
        model, optimizer = build(layout)
        set_grads(model, 0)
        optimizer.step()
        set_grads(model, 1)
        if dist.get_rank() == 0:
            p = [*model.parameters()][index]
            if missing:
                p.grad = None
            else:
                local(p.grad).zero_()
        optimizer.step()
        results.append(snapshot(optimizer))
    assert same_bits(*results)
    return whole(model)


@pytest.mark.parametrize("layout", ["FSDP2", "HSDP", "FSDP2 x TP"])
@pytest.mark.parametrize("index", [0, 1], ids=["muon", "adamw"])
def test_r16_a_gradient_that_only_some_ranks_miss_counts_as_zeros(run_ranks, layout, index):
    run_ranks(LAYOUTS[layout], step_with_none_on_rank_0, layout, index)


# New weights are there after step()


def read_after_step(layout):
    model, optimizer = build(layout, bucket_cap_mb=1e-4)
    for step in range(3):
        set_grads(model, step)
        before = whole(model)
        optimizer.step()
        read = [full_tensor(t).clone() for t in model.state_dict().values()]
        dist.barrier()
        later = whole(model)
        assert same_bits([read], [later])
        assert not any(torch.equal(a, b) for a, b in zip(before, later, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_r32_every_read_after_a_step_sees_the_new_weights(run_ranks, layout):
    run_ranks(LAYOUTS[layout], read_after_step, layout)


# CPU offload


def train_offloaded():
    weights = []
    for policy in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        model = fully_shard(tiny_model(), mesh=init_device_mesh("cpu", (2,)), **policy)
        optimizer = optimizer_of(model)
        for step in range(3):
            model(seeded((4, 6), dist.get_rank(), step)).square().mean().backward()
            dmuon.clip_grad_norm_(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.device.type == "cpu" for p in model.parameters())
        weights.append(whole(model))
    assert_near(*weights)


def test_r71_offloaded_parameters_train_as_others_do(run_ranks):
    run_ranks(2, train_offloaded)


# Parameters that change after construction


def shard_after_construction():
    model, reference = tiny_model(), tiny_model()
    optimizer = optimizer_of(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    set_grads(model, 0)
    with pytest.raises(RuntimeError, match=r"0\.weight: no parameter .* holds the old parameters"):
        optimizer.step()
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [named[name] for name in group["param_names"]]
    expected = optimizer_of(reference)
    for step in range(2):
        set_grads(model, step)
        optimizer.step()
        set_grads(reference, step)
        expected.step()
    assert set(optimizer.state) == set(model.parameters())
    assert_near(whole(model), whole(reference))


def test_parameters_sharded_after_construction_raise_until_replaced_and_then_train(run_ranks):
    run_ranks(2, shard_after_construction)


def swap_between_steps():
    """A trained plain model is sharded between two steps, its state moved by a state dict."""
    model, reference = tiny_model(), tiny_model()
    optimizer, expected = optimizer_of(model), optimizer_of(reference)
    set_grads(model, 0)
    optimizer.step()
    set_grads(reference, 0)
    expected.step()
    state = copy.deepcopy(optimizer.state_dict())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [named[name] for name in group["param_names"]]
    optimizer.load_state_dict(state)
    set_grads(model, 1)
    optimizer.step()
    set_grads(reference, 1)
    expected.step()
    assert_near(whole(model), whole(reference))


def test_a_model_may_be_sharded_between_two_steps(run_ranks):
    run_ranks(2, swap_between_steps)


def lora(layout):
    """A frozen base with adapters; one adapter is frozen after the first step."""
    model = nn.ModuleDict(
        {
            "base": nn.Linear(8, 8, bias=False),
            "a": nn.Linear(8, 2, bias=False),
            "b": nn.Linear(2, 8, bias=False),
        }
    )
    for i, p in enumerate(model.parameters()):
        p.data.copy_(seeded(tuple(p.shape), i))
    model["b"].weight.data.zero_()
    model["base"].weight.requires_grad_(False)
    if layout == "FSDP2":
        for module in model.values():
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return model


def train_adapters(layout):
    model = lora(layout)
    group = dist.group.WORLD if layout == "DDP" else None
    optimizer = dmuon.Muon(model.named_parameters(), lr=LR, process_group=group)
    base, a, _ = model.parameters()
    start = full_tensor(base).clone()
    after = []
    for step in range(3):
        set_grads(model, step)
        base.grad = None
        optimizer.step()
        after.append(snapshot(optimizer)[1:])
        a.requires_grad_(False)
    assert torch.equal(full_tensor(base), start)
    assert not optimizer.state.get(base)
    assert same_bits(after[0][:1], after[2][:1]), "a was frozen after the first step"
    assert not same_bits(after[1][1:], after[2][1:])
    base.requires_grad_(True)
    a.requires_grad_(True)
    set_grads(model, 4)
    optimizer.step()
    assert not torch.equal(full_tensor(base), start)
    assert set(optimizer.state[base]) == {"momentum_buffer"}


@pytest.mark.parametrize("layout", ["DDP", "FSDP2"])
def test_parameters_may_be_frozen_and_unfrozen_at_any_time(run_ranks, layout):
    run_ranks(2, train_adapters, layout)


def grow(layout):
    mesh = init_device_mesh("cpu", (2,))

    def parameter(shape, i):
        value = seeded(shape, i)
        if layout == "FSDP2":
            value = distribute_tensor(value, mesh, [Shard(0)])
        return nn.Parameter(value)

    params = [parameter((4, 6), 0)]
    group = dist.group.WORLD if layout == "DDP" else None
    optimizer = dmuon.Muon([("first", params[0])], lr=LR, process_group=group)
    num_ns = []
    for _ in range(2):
        for p in params:
            p.grad = p.detach().clone()
        optimizer.step()
        num_ns.append(optimizer.stats.ns_matrices)
        if len(params) == 1:
            params += [parameter((3, 5), 1), parameter((7,), 2)]
            optimizer.add_param_group({"params": [("second", params[1])], "lr": 0.5})
            optimizer.add_param_group({"params": [("bias", params[2])], "algorithm": "adamw"})
    assert all(
        not torch.equal(full_tensor(p), seeded(tuple(p.shape), i)) for i, p in enumerate(params)
    )
    return num_ns


@pytest.mark.parametrize("layout", ["DDP", "FSDP2"])
def test_a_group_added_later_takes_part_in_the_next_step(run_ranks, layout):
    results = run_ranks(2, grow, layout)
    assert [sum(counts) for counts in zip(*results, strict=True)] == [1, 2]


# The snippets of docs/gradients.md

DOCS = Path(__file__).parents[2] / "docs" / "gradients.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)


def run_snippet(code):
    layout = "DDP" if "no_sync" in code else "FSDP2"
    model, optimizer = build(layout)
    micro_batches = [(seeded((4, 6), i), seeded((4, 5), i)) for i in range(2)]
    x, y = micro_batches[0]
    if ".backward()" not in code:
        set_grads(model, 0)
    before = whole(model)
    names = {
        **{"torch": torch, "dmuon": dmuon, "contextlib": contextlib, "device": "cpu"},
        **{"model": model, "optimizer": optimizer, "loss_fn": nn.functional.mse_loss},
        **{"micro_batches": micro_batches, "x": x, "y": y},
    }
    exec(code, names)
    if "step(" not in code:
        names["optimizer"].step()
    assert not any(torch.equal(a, b) for a, b in zip(before, whole(model), strict=True))


@pytest.mark.parametrize("code", SNIPPETS, ids=[s.split("\n")[0][:40] for s in SNIPPETS])
def test_every_snippet_of_the_page_runs_and_trains(run_ranks, code):
    run_ranks(2, run_snippet, code)


# The end of a process


def exit_after_training(rank, directory):
    """Two meshes and sub-groups, destroyed at the end or left to the interpreter."""
    log = os.open(Path(directory) / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    own = DeviceMesh("cpu", [rank])
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    params = [
        nn.Parameter(distribute_tensor(seeded((4, 3), 0), both, [Shard(0), Replicate()])),
        nn.Parameter(distribute_tensor(seeded((4, 3), 1), own, [Shard(0)])),
    ]
    optimizer = dmuon.Muon(params)
    for _ in range(3):
        for p in params:
            p.grad = p.detach().clone()
        optimizer.step()
    if "destroyed" in directory:
        dist.destroy_process_group()


@pytest.mark.parametrize("end", ["destroyed", "left"])
def test_a_process_ends_without_a_word_after_training(end):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix=end) as directory:
        ranks = [context.Process(target=exit_after_training, args=(r, directory)) for r in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=40)
        logs = [(Path(directory) / f"log-{r}").read_text() for r in (0, 1)]
        assert [process.exitcode for process in ranks] == [0, 0], logs
    # Before 2.11, torch's gloo says who is connected.
    lines = [line for log in logs for line in log.splitlines()]
    assert [line for line in lines if not line.startswith("[Gloo] Rank ")] == []
