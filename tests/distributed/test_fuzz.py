"""Random acts of a user between steps: two ranks end as one process does, or all with one error.

A case is a model, and a dozen acts drawn from one seed. Legal acts are done to a job on all ranks
and to a whole copy of it on each; illegal ones to the job alone, which must refuse the next step on
all ranks with one named error and change nothing; they are then taken back, and the case goes on.
"""

import contextlib
import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dmuon
from tests.support.faults import (
    LR,
    Job,
    assert_near,
    lay_out,
    refused_by_all,
    same,
)
from tests.support.parity import seeded

NUM_CASES, NUM_CALLS, NUM_ACTS = 200, 4, 5
# Two orders of adding up differ by rounding, which Newton-Schulz magnifies.
TOLERANCE = 2e-4


class Case:
    """A job on all ranks, a whole copy of it, and what happens to them."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.step = 1000 * seed
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.nonfinite = self.random.choice(["propagate", "skip", "raise"])
        self.specs = self.draw_specs()
        self.job, self.alone = self.make(self.mesh), self.make(None)

    def draw_specs(self):
        """Shape, whether it is sharded, and what its group says, by name."""
        draw = self.random.randint
        kinds = {
            "sharded": ((draw(1, 7), draw(2, 6)), True, {}),
            "tall": ((draw(6, 9), 3), True, {"momentum": 0.8}),
            "copy": ((draw(2, 6), draw(2, 6)), False, {"nesterov": False}),
            "experts": ((draw(1, 4), 4, 3), True, {"algorithm": "normuon"}),
            "fused": ((6, draw(2, 5)), True, {"split": (2, 4)}),
            "bias": ((draw(1, 6),), True, {"algorithm": "adamw", "lr": 0.01}),
            "scale": ((3, 4), False, {"algorithm": "adamw", "lr": 0.01}),
        }
        names = ["sharded", *self.random.sample(sorted(kinds)[:-1], draw(2, 5)), "scale"]
        return {name: kinds[name] for name in dict.fromkeys(names)}

    def make(self, mesh):
        params = {n: self.parameter(n, *spec[:2], mesh) for n, spec in self.specs.items()}
        groups = [{"params": [(n, params[n])], **self.specs[n][2]} for n in params]
        return Job(params, self.optimizer(groups, mesh), mesh)

    def optimizer(self, groups, mesh):
        group = dist.group.WORLD if mesh else None
        nonfinite = self.nonfinite if mesh else "propagate"
        return dmuon.Muon(groups, lr=LR, process_group=group, nonfinite=nonfinite)

    def parameter(self, name, shape, is_sharded, mesh, key=0):
        value = seeded(shape, len(name), key)
        return nn.Parameter(lay_out(value, mesh) if is_sharded and mesh else value)

    @property
    def both(self):
        return self.job, self.alone

    def set_grads(self):
        self.step += 1
        for each in self.both:
            each.set_grads(self.step)

    def name(self, *, sharded=None, trained=True):
        """A random parameter; one that has a gradient, if it must be trained."""
        found = [
            name
            for name, p in self.job.params.items()
            if sharded in (None, isinstance(p, DTensor)) and (p.requires_grad or not trained)
        ]
        return self.random.choice(found) if found else None

    def group_number(self):
        return self.random.randrange(len(self.job.optimizer.param_groups))

    def run(self):
        """Some acts, each before a step; returns what was done."""
        done = []
        for number in range(NUM_ACTS):
            act = self.random.choice([*LEGAL, *ILLEGAL]) if number else nothing
            done.append(act.__name__)
            self.set_grads()
            around = self.refuse(act) if act in ILLEGAL else act(self)
            with (around or contextlib.nullcontext)():
                self.job.optimizer.step()
            self.alone.optimizer.step()
            whole, expected = self.job.whole(), self.alone.whole()
            assert_near({n: w.float() for n, w in whole.items()}, floats(expected), TOLERANCE)
            numbers = self.job.numbers()
            assert all(t.isfinite().all() for t in numbers.values())
        return done

    def refuse(self, act):
        is_mine = self.random.choice([0, 1, None]) in (None, dist.get_rank())
        outcome = act(self, is_mine)
        if outcome is None:
            return
        undo, says = outcome
        message = refused_by_all(self.job)
        assert says in message, message
        undo()


def floats(weights):
    return {name: w.detach().float() for name, w in weights.items()}


# Legal acts


def nothing(case):
    pass


def freeze(case):
    if (name := case.name()) and sum(p.requires_grad for p in case.job.params.values()) > 1:
        for each in case.both:
            each.params[name].requires_grad_(False)


def thaw(case):
    for each in case.both:
        for p in each.params.values():
            p.requires_grad_(True)


def drop_a_gradient(case):
    if name := case.name():
        for each in case.both:
            each.params[name].grad = None


def drop_a_gradient_on_one_rank(case):
    """Counts as zeros, where it is sharded."""
    name, rank = case.name(sharded=True), case.random.randrange(2)
    if name:
        p, whole = case.job.params[name], case.alone.params[name]
        rows = -(-p.shape[0] // dist.get_world_size())
        whole.grad[rows * rank : rows * (rank + 1)] = 0
        if dist.get_rank() == rank:
            p.grad = None


def another_dtype(case):
    if name := case.name():
        for each in case.both:
            p = each.params[name]
            p.grad, grad = None, p.grad.to(torch.float64)
            p.grad_dtype = None
            p.grad = grad


def add_a_group(case):
    name = f"added{len(case.specs)}"
    algorithm = case.random.choice(["muon", "adamw"])
    case.specs[name] = ((5, 3), case.random.random() < 0.5, {"algorithm": algorithm})
    for each in case.both:
        p = each.params[name] = case.parameter(name, *case.specs[name][:2], each.mesh)
        each.optimizer.add_param_group({"params": [(name, p)], "algorithm": algorithm})


def replace(case):
    """Its state starts afresh."""
    name = case.random.choice(sorted(case.job.params))
    number = [*case.job.params].index(name)
    for each in case.both:
        p = case.parameter(name, *case.specs[name][:2], each.mesh, case.step)
        each.params[name] = p
        each.optimizer.param_groups[number]["params"] = [p]
    case.set_grads()


def cast_and_back(case):
    for each in case.both:
        module = nn.ParameterList(each.params.values())
        module.double()
        each.set_grads(case.step)
        each.optimizer.step()
        module.float()
        each.set_grads(case.step)


def save_and_load(case):
    job = case.job
    saved = copy.deepcopy(job.optimizer.state_dict())
    groups = [{"params": [(n, p)], **case.specs[n][2]} for n, p in job.params.items()]
    job.optimizer = case.optimizer(groups, job.mesh)
    job.optimizer.load_state_dict(saved)


def change_values(case):
    number = case.group_number()
    key, value = case.random.choice(
        [
            ("lr", 0.03),
            ("weight_decay", 0.2),
            ("momentum", 0.7),
            ("nesterov", False),
            ("ns_steps", 3),
            ("betas", (0.8, 0.99)),
            ("adjust_lr_fn", "match_rms_adamw"),
        ]
    )
    for each in case.both:
        each.optimizer.param_groups[number][key] = value


def autocast(case):
    return lambda: torch.autocast("cpu", torch.bfloat16)


def clip(case):
    norms = [dmuon.clip_grad_norm_(each.optimizer, 1.5) for each in case.both]
    torch.testing.assert_close(*norms)


def nan(case):
    """Left out by all ranks, or an error of all."""
    name, rank = case.name(), case.random.randrange(2)
    if name is None or case.nonfinite == "propagate":
        return None
    if dist.get_rank() == rank:
        grad = case.job.params[name].grad
        (grad.to_local() if isinstance(grad, DTensor) else grad).fill_(torch.nan)
    grad = case.job.params[name].grad
    if isinstance(grad, DTensor) and not grad.full_tensor().isnan().any():
        return None  # that rank stores nothing of it
    before = case.job.numbers()
    if case.nonfinite == "raise":
        assert refused_by_all(case.job).startswith(f"{name}: the gradient has an infinite")
    else:
        case.job.optimizer.step()
        assert same(before, case.job.numbers())
    case.set_grads()
    return None


# Illegal acts: each gives how to take it back, and what the error says


def in_a_group(case, is_mine, number, values):
    group = case.job.optimizer.param_groups[number]
    before = {key: group[key] for key in values}
    if is_mine:
        group.update(values)
    return lambda: group.update(before)


def other_values(case, is_mine):
    number = case.random.randrange(len(case.job.optimizer.param_groups))
    name = [*case.job.params][number]
    key, value = case.random.choice([("lr", 0.7), ("weight_decay", 0.6), ("lr", -1.0)])
    if value > 0:  # the same on all ranks would be legal
        is_mine = dist.get_rank() == 0
    undo = in_a_group(case, is_mine, number, {key: value})
    if not case.job.optimizer.state.get(case.job.params[name]):
        undo()  # frozen from the start: nothing is read of it
        return None
    return undo, name if value > 0 else "lr must be a number"


def freeze_or_thaw_one(case, is_mine):
    name = case.random.choice(sorted(case.job.params))
    p = case.job.params[name]
    was = p.requires_grad
    if dist.get_rank() == 0:
        p.requires_grad_(not was)
    return (lambda: p.requires_grad_(was)), name


def sparse(case, is_mine):
    if not (name := case.name(sharded=False)):
        return None
    p = case.job.params[name]
    grad = p.grad
    if is_mine:
        p.grad = None
        p.grad = grad.to_sparse()

    def undo():
        p.grad = None
        p.grad = grad

    return undo, f"{name}: the gradient is sparse"


def whole_and_plain(case, is_mine):
    if not (name := case.name(sharded=True)):
        return None
    p = case.job.params[name]
    grad = p.grad
    if is_mine:
        p.grad = None
        p.grad = torch.ones(p.shape, dtype=p.dtype)

    def undo():
        p.grad = None
        p.grad = grad

    return undo, f"{name}: the gradient is a plain tensor"


def add_on_one_rank(case, is_mine):
    optimizer = case.job.optimizer
    late = case.parameter("late", (4, 4), is_sharded=True, mesh=case.mesh)
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [("late", late)]})

    def undo():
        if dist.get_rank() == 1:
            optimizer.param_groups.pop()

    return undo, "late"


def another_shape_on_one_rank(case, is_mine):
    number = case.group_number()
    name = [*case.job.params][number]
    shape, is_sharded, _ = case.specs[name]
    group = case.job.optimizer.param_groups[number]
    was, state = group["params"], dict(case.job.optimizer.state.get(case.job.params[name], {}))
    fresh = case.parameter(name, (*shape[:-1], shape[-1] + 1), is_sharded, case.mesh)
    if dist.get_rank() == 0:
        group["params"] = [fresh]

    def undo():
        group["params"] = was
        assert {*state} == {*case.job.optimizer.state.get(was[0], {})}

    return undo, name


LEGAL = [
    nothing,
    freeze,
    thaw,
    drop_a_gradient,
    drop_a_gradient_on_one_rank,
    another_dtype,
    add_a_group,
    replace,
    cast_and_back,
    save_and_load,
    change_values,
    autocast,
    clip,
    nan,
]
ILLEGAL = [
    other_values,
    freeze_or_thaw_one,
    sparse,
    whole_and_plain,
    add_on_one_rank,
    another_shape_on_one_rank,
]


def run_cases(first, num):
    done = []
    for seed in range(first, first + num):
        case = Case(seed)
        try:
            done += case.run()
        except BaseException as error:
            error.add_note(f"case {seed} with {case.nonfinite}, {[*case.specs]}")
            raise
    return done


@pytest.mark.parametrize("call", range(NUM_CALLS))
def test_any_acts_between_steps_end_as_on_one_process_or_in_one_error(run_ranks, call):
    num = NUM_CASES // NUM_CALLS
    first, second = run_ranks(2, run_cases, call * num, num, timeout=120)
    assert first == second
    assert {act.__name__ for act in (*LEGAL, *ILLEGAL)} == set(first)
