"""No gradient is taken on trust: its type, mesh, placements, density and shape are checked."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import dmuon
from tests.support.faults import (
    LR,
    Job,
    assert_near,
    laid_out_like,
    lay_out,
    local,
    refused,
    refused_by_all,
)
from tests.support.parity import seeded

SHAPE, VECTOR = (7, 5), (9,)


def whole_and_plain(p, mesh):
    return torch.ones(p.shape)


def on_another_mesh(p, mesh):
    other = init_device_mesh("cpu", (dist.get_world_size(), 1))
    return lay_out(torch.ones(p.shape), other, [Shard(0), Replicate()])


def along_another_dim(p, mesh):
    return lay_out(torch.ones(p.shape), mesh, [Shard(1)])


BAD = {
    "whole and plain": (whole_and_plain, "the gradient is a plain tensor"),
    "another mesh": (on_another_mesh, "the gradient lies on"),
    "another dim": (along_another_dim, "the gradient lies on"),
    "another shape": (None, "the gradient has shape"),
}


def take(bad, name, who, call):
    job, alone = Job.make(), Job.make(distributed=False)
    for each in (job, alone):
        each.set_grads(0)
        each.optimizer.step()
    job.set_grads(1)
    p = job.params[name]
    if who == "all" or dist.get_rank() == 1:
        p.grad = None
        if bad == "another shape":
            p.grad = torch.empty_like(p)
            p.grad.data = torch.ones(3, 5)  # as data that is replaced leaves it
        else:
            p.grad = BAD[bad][0](p, job.mesh)
    calls = {"step": job.optimizer.step, "clip": lambda: dmuon.clip_grad_norm_(job.optimizer, 1.0)}
    if call == "skip":
        job.optimizer = dmuon.Muon(job.optimizer.param_groups, nonfinite="skip")
    message = refused_by_all(job, calls.get(call, job.optimizer.step))
    assert message.startswith(f"{name}: {BAD[bad][1]}"), message
    p.grad = None
    if call == "skip":
        return
    for each in (job, alone):
        each.set_grads(1)
        each.optimizer.step()
    assert_near(job.whole(), alone.whole())


@pytest.mark.parametrize("call", ["step", "skip", "clip"])
@pytest.mark.parametrize("who", ["all", "one rank"])
@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ("whole and plain", "tall"),
        ("whole and plain", "bias"),
        ("another mesh", "tall"),
        ("another mesh", "bias"),
        ("another dim", "tall"),
        ("another shape", "copy"),
    ],
)
def test_a_gradient_that_is_not_laid_out_as_its_parameter_is_refused_by_all(
    run_ranks, bad, name, who, call
):
    # It was taken without a word, and clipped to another norm.
    run_ranks(2, take, bad, name, who, call)


# Sparse gradients


def sparse(shape):
    index, values = torch.tensor([[1, 2]]), torch.ones(2, shape[1])
    return torch.sparse_coo_tensor(index, values, shape, check_invariants=True)


def train_an_embedding(who, call):
    """A sharded matrix and, beside it, an embedding with a sparse gradient that is optimized so."""
    job = Job.make()
    table = nn.Parameter(seeded((10, 4), 3))
    job.params["table"] = table
    job.optimizer.add_param_group({"params": [("table", table)], "algorithm": "adamw"})
    for step in range(2):
        job.set_grads(step)
        job.optimizer.step()
    if who == "all" or dist.get_rank() == 0:
        table.grad = sparse((10, 4))
    if call == "skip":
        job.optimizer = dmuon.Muon(
            job.optimizer.param_groups, nonfinite="skip", process_group=dist.group.WORLD
        )
    step = job.optimizer.step
    clip = lambda: dmuon.clip_grad_norm_(job.optimizer, 1.0)  # noqa: E731
    message = refused_by_all(job, clip if call == "clip" else step)
    assert message.startswith("table: the gradient is sparse"), message
    job.set_grads(2)
    job.optimizer.step()


@pytest.mark.parametrize("call", ["step", "skip", "clip"])
@pytest.mark.parametrize("who", ["all", "one rank"])
def test_a_sparse_gradient_decays_nothing_and_leaves_no_rank_behind(run_ranks, who, call):
    run_ranks(2, train_an_embedding, who, call)


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_sparse_gradient_is_refused_on_one_process(algorithm):
    job = Job.make(distributed=False)
    table = nn.Parameter(seeded((10, 4), 3))
    job.params["table"] = table
    job.optimizer.add_param_group({"params": [("table", table)], "algorithm": algorithm})
    job.set_grads(0)
    table.grad = sparse((10, 4))
    error, text = refused(job)
    assert error == "ValueError"
    assert text.startswith("table: the gradient is sparse")


def test_a_gradient_of_other_data_is_refused_on_one_process():
    job = Job.make(distributed=False)
    job.set_grads(0)
    p = job.params["bias"]
    p.data = torch.ones(4)
    job.optimizer.state.pop(p)
    assert refused(job)[1].startswith("bias: the gradient has shape (9,), but the parameter (4,)")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gradient_of_another_dtype_is_taken_in_that_of_the_state(dtype):
    job, expected = Job.make(distributed=False), Job.make(distributed=False)
    for step in range(2):
        for each in (job, expected):
            each.set_grads(step)
        for p, q in zip(job.params.values(), expected.params.values(), strict=True):
            if p.grad is not None:
                q.grad = q.grad.to(dtype).to(q.dtype)
                p.grad, grad = None, p.grad.to(dtype)
                p.grad_dtype = None
                p.grad = grad
        for each in (job, expected):
            each.optimizer.step()
    assert_near(job.whole(), expected.whole(), tolerance=0)


# Gradients that are not reduced yet


def partial(total, p, op="sum"):
    """This rank's share of a gradient, with other numbers on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shares = [seeded(tuple(p.shape), 77, r) for r in range(size - 1)]
    shares.append((total * size if op == "avg" else total) - sum(shares))
    placements = [Partial(op) if p.is_replicate() or p.is_shard() else p for p in p.placements]
    return DTensor.from_local(
        shares[rank], p.device_mesh, placements, run_check=False, shape=p.shape, stride=p.stride()
    )


NAMES = ("wide", "tall", "bias")


def prepare(op, missing):
    """Partial gradients, one of which the last rank lacks; and a whole job with their sums."""
    job, alone = Job.make(), Job.make(distributed=False)
    for each in (job, alone):
        each.set_grads(0)
        each.optimizer.step()
    lacks = dist.get_rank() == dist.get_world_size() - 1
    for i, name in enumerate(NAMES):
        p, w = job.params[name], alone.params[name]
        w.grad = seeded(tuple(p.shape), 5, i)
        p.grad = partial(w.grad, p, op)
        if name == missing:
            size = dist.get_world_size()
            whole = [seeded(tuple(p.shape), 77, r) for r in range(size - 1)]
            w.grad = sum(whole) / (size if op == "avg" else 1)
            p.grad = None if lacks else p.grad
    for each in (job, alone):
        each.params["copy"].grad = seeded((4, 6), 6)
    return job, alone


def reduce_in_step(op, missing, call, reverse):
    job, alone = prepare(op, missing)
    if call == "skip":
        groups = [dict(g) for g in job.optimizer.param_groups]
        state = job.optimizer.state
        job.optimizer = dmuon.Muon(groups, nonfinite="skip", process_group=dist.group.WORLD)
        job.optimizer.state = state
    if reverse and dist.get_rank() == 0:
        job.optimizer.param_groups.reverse()
        for group in job.optimizer.param_groups:
            group["params"], group["param_names"] = (
                group["params"][::-1],
                group["param_names"][::-1],
            )
    if call == "clip":
        norms = [dmuon.clip_grad_norm_(each.optimizer, 2.5) for each in (job, alone)]
        torch.testing.assert_close(*norms)
    with CommDebugMode() as counted:
        job.optimizer.step()
    alone.optimizer.step()
    assert_near(job.whole(), alone.whole())
    counts = {str(key): value for key, value in counted.get_comm_counts().items()}
    return sum(value for key, value in counts.items() if "reduce_scatter" in key)


@pytest.mark.parametrize("call", ["step", "skip", "clip"])
@pytest.mark.parametrize("reverse", [False, True], ids=["", "listed in another order"])
@pytest.mark.parametrize("missing", [None, *NAMES])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_partial_gradients_are_added_up_once_in_one_order(run_ranks, op, missing, reverse, call):
    # They were reduced up to three times, in each rank's own order, and not where one was missing.
    if call == "clip" and (op, reverse) != ("sum", False):
        pytest.skip("covered by the step")
    counts = run_ranks(2, reduce_in_step, op, missing, call, reverse)
    assert counts == [0 if call == "clip" else len(NAMES)] * 2


def partial_on_one_rank(name, call):
    job, _ = prepare("sum", None)
    p = job.params[name]
    if dist.get_rank() == 0:
        p.grad = None
        p.grad = laid_out_like(torch.ones(p.shape), p)
    clip = lambda: dmuon.clip_grad_norm_(job.optimizer, 2.5)  # noqa: E731
    message = refused_by_all(job, clip if call == "clip" else None)
    assert message.startswith(f"{name}: its gradient has other placements on some ranks")


@pytest.mark.parametrize("call", ["step", "clip"])
@pytest.mark.parametrize("name", ["tall", "bias"])
def test_a_gradient_that_is_partial_on_one_rank_only_is_refused_by_all(run_ranks, name, call):
    run_ranks(2, partial_on_one_rank, name, call)


def hybrid(missing):
    """Replicated over two, sharded over two; gradients partial over the replicas."""
    mesh = init_device_mesh("cpu", (2, 2))
    layout = [Replicate(), Shard(0)]
    params = {n: nn.Parameter(lay_out(seeded(s, 1), mesh, layout)) for n, s in SIZES.items()}
    whole = {n: nn.Parameter(seeded(s, 1)) for n, s in SIZES.items()}
    optimizers = [
        dmuon.Muon(
            [
                {"params": [("w", found["w"])]},
                {"params": [("b", found["b"])], "algorithm": "adamw"},
            ],
            lr=LR,
        )
        for found in (params, whole)
    ]
    replica = mesh.get_coordinate()[0]
    for name, p in params.items():
        shares = [seeded(SIZES[name], 8, r) for r in range(2)]
        whole[name].grad = shares[0] if name == missing else shares[0] + shares[1]
        rows = local(lay_out(shares[replica], mesh, layout))
        p.grad = DTensor.from_local(
            rows, mesh, [Partial(), Shard(0)], run_check=False, shape=p.shape, stride=p.stride()
        )
        if name == missing and replica == 1:
            p.grad = None
    for optimizer in optimizers:
        optimizer.step()
    assert_near({n: p.full_tensor().detach() for n, p in params.items()}, whole)


SIZES = {"w": (7, 5), "b": (9,)}


@pytest.mark.parametrize("missing", [None, "w", "b"])
def test_gradients_that_are_partial_over_replicas_are_added_up(run_ranks, missing):
    run_ranks(4, hybrid, missing)


def replicated():
    """Gradients that every rank has whole."""
    job, alone = Job.make(), Job.make(distributed=False)
    for step in range(2):
        for each in (job, alone):
            each.set_grads(step)
        for name in NAMES:
            p = job.params[name]
            p.grad, whole = None, p.grad.redistribute(placements=[Replicate()])
            p.grad = whole
        norms = [dmuon.clip_grad_norm_(each.optimizer, 2.0) for each in (job, alone)]
        torch.testing.assert_close(*norms)
        for each in (job, alone):
            each.optimizer.step()
    assert_near(job.whole(), alone.whole())


def test_gradients_that_every_rank_has_whole_are_cut(run_ranks):
    run_ranks(2, replicated)
