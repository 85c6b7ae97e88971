"""What one rank alone does or finds is known to all of them before anything moves."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dmuon
from tests.support.faults import (
    Job,
    assert_near,
    lay_out,
    local,
    refused_by_all,
    same,
)
from tests.support.parity import seeded


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
    return DTensor.from_local(rows, job.mesh, [Shard(0)], run_check=False, shape=(7, 5), stride=(5, 1))


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
