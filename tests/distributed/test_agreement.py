"""What one rank alone does or finds is known to all of them before anything moves."""

import contextlib
import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dmuon
from dmuon.transport.groups import Groups
from tests.support.faults import (
    Job,
    assert_near,
    lay_out,
    local,
    refused,
    refused_by_all,
    same,
)
from tests.support.parity import seeded
from tests.support.rank_pool import PRELOAD


def in_group(number, **values):
    def change(job):
        group = job.optimizer.param_groups[number]
        before = {key: group[key] for key in values}
        group.update(values)
        return lambda: group.update(before)

    return change


def add_a_group(job):
    late = Job.parameter("late", job.mesh, (5, 4))
    job.optimizer.add_param_group({"params": [("late", late)]})

    def undo():
        del job.optimizer.param_groups[-1]

    return undo


def thaw(job):
    job.params["frozen"].requires_grad_(True)
    return lambda: job.params["frozen"].requires_grad_(False)


def freeze(job):
    job.params["tall"].requires_grad_(False)
    return lambda: job.params["tall"].requires_grad_(True)


def replacing(make):
    def replace(job):
        params = job.optimizer.param_groups[0]["params"]
        was, params[1] = params[1], nn.Parameter(make(job))
        state = dict(job.optimizer.state[was])

        def undo():
            params[1] = was
            job.optimizer.state[was] = state

        return undo

    return replace


def cut_short(job):
    """A local tensor that the placements do not imply, which only this rank can see."""
    rows = job.params["tall"].to_local().detach()[1:]
    return DTensor.from_local(
        rows, job.mesh, [Shard(0)], run_check=False, shape=(7, 5), stride=(5, 1)
    )


def drop(job):
    group = job.optimizer.param_groups[0]
    was = group["params"], group["param_names"]
    group["params"], group["param_names"] = (values[:1] for values in was)
    return lambda: group.update(params=was[0], param_names=was[1])


def unnamed(job):
    group = job.optimizer.param_groups[0]
    was = group["params"]
    group["params"] = was[:1]
    return lambda: group.update(params=was)


def regroup(job):
    """The same groups as a line of values, with a parameter in the other one."""
    first, second, *_ = job.optimizer.param_groups
    was = [(group["params"], group["param_names"]) for group in (first, second)]
    moved = first["params"][1:], first["param_names"][1:]
    first.update(params=first["params"][:1], param_names=first["param_names"][:1])
    second.update(
        params=[*moved[0], *second["params"]], param_names=[*moved[1], *second["param_names"]]
    )

    def undo():
        for group, (params, names) in zip((first, second), was, strict=True):
            group.update(params=params, param_names=names)

    return undo


def forget_a_key(job):
    group = job.optimizer.param_groups[0]
    was = group.pop("ns_steps")
    return lambda: group.update(ns_steps=was)


# What the last rank alone does, and what the error of all ranks says.
ACTS = {
    "ns_steps": (in_group(0, ns_steps=3), "tall"),
    "ns_coefficients": (in_group(1, ns_coefficients="polar_express"), "copy"),
    "eps of Newton-Schulz": (in_group(0, eps=1e-3), "tall"),
    "ns_dtype": (in_group(0, ns_dtype=torch.float64), "tall"),
    "lr": (in_group(0, lr=0.07), "tall"),
    "a tensor lr": (in_group(1, lr=torch.tensor(0.5)), "copy"),
    "nesterov": (in_group(1, nesterov=True), "copy"),
    "momentum": (in_group(0, momentum=0.5), "tall"),
    "weight_decay": (in_group(1, weight_decay=0.3), "copy"),
    "adjust_lr_fn": (in_group(0, adjust_lr_fn="match_rms_adamw"), "tall"),
    "AdamW's lr": (in_group(2, lr=0.5), "bias"),
    "AdamW's betas": (in_group(2, betas=(0.8, 0.9)), "bias"),
    "AdamW's eps": (in_group(2, eps=1e-3), "bias"),
    "AdamW's weight_decay": (in_group(2, weight_decay=0.0), "bias"),
    "a bad momentum": (in_group(0, momentum=1.5), "momentum must be in"),
    "a bad lr": (in_group(2, lr=-1.0), "lr must be a number"),
    "a bad list": (in_group(1, ns_coefficients="no such list"), "no such list"),
    "another algorithm": (in_group(0, use_muon=False), "do not go together"),
    "a missing key": (forget_a_key, "ns_steps"),
    "a group": (add_a_group, "late"),
    "thawed": (thaw, "frozen"),
    "frozen": (freeze, "tall"),
    "dropped": (drop, "tall"),
    "unnamed": (unnamed, "1 parameters but 2 param_names"),
    "in another group": (regroup, "tall"),
    "replaced by another shape": (replacing(lambda job: lay_out(seeded((8, 5)), job.mesh)), "tall"),
    "replaced by another dim": (
        replacing(lambda job: lay_out(seeded((7, 5)), job.mesh, [Shard(1)])),
        "tall",
    ),
    "replaced by another dtype": (
        replacing(lambda job: lay_out(seeded((7, 5)).double(), job.mesh)),
        "tall",
    ),
    "replaced by a vector": (replacing(lambda job: lay_out(seeded((8,)), job.mesh)), "tall"),
    "replaced by a plain tensor": (replacing(lambda job: seeded((7, 5))), "tall"),
    "a layout that one rank refuses": (replacing(cut_short), "tall"),
}


def act_on_the_last_rank(name):
    act, says = ACTS[name]
    job, alone = Job.make(), Job.make(distributed=False)
    for each in (job, alone):
        each.set_grads(0)
        each.optimizer.step()
    for step in (1, 2):
        job.set_grads(step)
        undo = act(job) if dist.get_rank() == dist.get_world_size() - 1 else lambda: None
        assert says in refused_by_all(job)
        assert says in refused_by_all(job), "the second time"
        undo()
        for each in (job, alone):
            each.set_grads(step)
            each.optimizer.step()
        assert_near(job.whole(), alone.whole())


@pytest.mark.parametrize("name", ACTS)
def test_what_one_rank_does_after_a_good_step_is_refused_by_all_until_it_is_undone(run_ranks, name):
    # All ranks waited for the group's timeout, or stepped without a word.
    run_ranks(2, act_on_the_last_rank, name)


# Stages of a pipeline share no parameter, and step or skip together.


def stage(ranks, **options):
    """A sharded matrix and a vector on this rank's stage."""
    mine = next(found for found in ranks if dist.get_rank() in found)
    # All ranks make all meshes, in one order, as torch wants it.
    mesh = [DeviceMesh("cpu", list(found)) for found in ranks][ranks.index(mine)]
    names = [f"stage{mine[0]}.weight", f"stage{mine[0]}.bias"]
    params = [nn.Parameter(lay_out(seeded(s, 5), mesh)) for s in ((6, 5), (4,))]
    groups = [
        {"params": [(names[0], params[0])]},
        {"params": [(names[1], params[1])], "algorithm": "adamw"},
    ]
    return Job(dict(zip(names, params, strict=True)), dmuon.Muon(groups, lr=0.02, **options), mesh)


def spoil_one_stage(ranks, bad_rank, nonfinite):
    job = stage(ranks, nonfinite=nonfinite)
    for step in range(3):
        job.set_grads(step)
        if step == 1 and dist.get_rank() == bad_rank:
            local(next(iter(job.params.values())).grad).view(-1)[0] = torch.inf
        before = job.numbers()
        if step == 1 and nonfinite == "raise":
            return refused_by_all(job)
        job.optimizer.step()
        assert same(before, job.numbers()) == (step == 1)
    return job.optimizer.skipped_steps


STAGES = [(((0, 1), (2,)), 0), (((0, 1), (2,)), 2), (((0,), (1,)), 0), (((0, 1), (2, 3)), 3)]


@pytest.mark.parametrize(("ranks", "bad_rank"), STAGES)
def test_stages_skip_together(run_ranks, ranks, bad_rank):
    # 2 + 1 ranks waited for ever; of 1 + 1 one skipped and the other stepped.
    size = sum(map(len, ranks))
    assert run_ranks(size, spoil_one_stage, ranks, bad_rank, "skip") == [1] * size
    (message,) = {*run_ranks(size, spoil_one_stage, ranks, bad_rank, "raise")}
    bad_stage = next(found[0] for found in ranks if bad_rank in found)
    assert message.startswith(f"stage{bad_stage}.weight: the gradient has an infinite")


def fail_on_one_stage(ranks, bad_rank):
    job = stage(ranks, nonfinite="skip")
    for step in range(2):
        job.set_grads(step)
        job.optimizer.step()
    group = job.optimizer.param_groups[0]
    if dist.get_rank() == bad_rank:
        group["weight_decay"] = -3
    message = refused_by_all(job)
    group["weight_decay"] = 0.1
    job.optimizer.step()
    return message


@pytest.mark.parametrize(("ranks", "bad_rank"), STAGES)
def test_an_error_on_one_stage_is_that_of_all_that_skip_together(run_ranks, ranks, bad_rank):
    size = sum(map(len, ranks))
    (message,) = {*run_ranks(size, fail_on_one_stage, ranks, bad_rank)}
    assert "weight_decay must be a number >= 0, got -3" in message


def no_gradient_on_one_stage():
    """Its matrix has none from the start, so that this stage alone refuses to step."""
    job = stage(((0,), (1,)), nonfinite="skip")
    job.set_grads(0, names={"stage1.weight", "stage0.bias", "stage1.bias"})
    return refused(job)


def test_a_stage_that_never_had_a_gradient_leaves_nobody_waiting(run_ranks):
    (first, text), second = run_ranks(2, no_gradient_on_one_stage)
    assert (first, second) == ("RuntimeError", None)
    assert text.startswith("stage0.weight: no parameter of the Muon groups has a gradient")


def skip_in_a_group():
    """Two jobs of two ranks each that know nothing of each other."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    pair = ((0, 1), (2, 3))[rank // 2]
    job = stage([(r,) for r in pair], nonfinite="skip", nonfinite_group=groups[rank // 2])
    for step in range(2):
        job.set_grads(step)
        if (step, rank) == (1, 0):
            next(iter(job.params.values())).grad.to_local().fill_(torch.nan)
        job.optimizer.step()
    return job.optimizer.skipped_steps


def test_a_group_that_is_named_skips_alone(run_ranks):
    assert run_ranks(4, skip_in_a_group) == [1, 1, 0, 0]


def skip_with_too_few():
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    job = Job.make(nonfinite="skip", nonfinite_group=own)
    job.set_grads(0)
    return refused(job)


def test_a_group_that_splits_a_parameter_is_refused(run_ranks):
    for error, text in run_ranks(2, skip_with_too_few):
        assert error == "ValueError"
        assert text.startswith("nonfinite_group has the ranks (")


# Groups


def wait_in_vain(rank, directory):
    """A group of dmuon's that another rank never joins; prints for how long it was waited for."""
    store = dist.FileStore(str(Path(directory) / "store"), 3)
    store.set_timeout(timedelta(seconds=3))
    dist.init_process_group(
        "gloo", rank=rank, world_size=3, store=store, timeout=timedelta(seconds=3)
    )
    if rank < 2:
        group = Groups().of((0, 1))
        dist.barrier()
        start = time.monotonic()
        if rank == 0:
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(torch.zeros(1), group=group)
            Path(directory, "waited").write_text(str(time.monotonic() - start))
        os._exit(0)
    dist.barrier()
    os._exit(0)


def test_a_group_of_its_own_has_the_timeout_that_the_user_gave(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ranks = [context.Process(target=wait_in_vain, args=(r, str(tmp_path))) for r in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=60)
    assert float((tmp_path / "waited").read_text()) < 6.0
