"""A state dict is plain data, and what others keep in groups and state stays theirs."""

import collections.abc
import copy
import enum
import io
import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmuon
from tests.support.faults import LR, assert_near
from tests.support.parity import seeded


class ListConfig(collections.abc.Sequence):
    """As OmegaConf's: a sequence that is no list."""

    def __init__(self, *items):
        self._items = items

    def __getitem__(self, index):
        return self._items[index]

    def __len__(self):
        return len(self._items)


class DictConfig(collections.abc.Mapping):
    """As OmegaConf's: a mapping that is no dict."""

    def __init__(self, **items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Scale(str, enum.Enum):
    MATCH = "match_rms_adamw"


class Steps(enum.IntEnum):
    FOUR = 4


def one(**options):
    weight, bias = nn.Parameter(seeded((6, 4), 1)), nn.Parameter(seeded((5,), 2))
    groups = [
        {"params": [("weight", weight)], **options},
        {"params": [("bias", bias)], "algorithm": "adamw"},
    ]
    return (weight, bias), dmuon.Muon(groups, lr=LR)


def train(params, optimizer, steps):
    for step in steps:
        for i, p in enumerate(params):
            p.grad = seeded(tuple(p.shape), step, i)
        optimizer.step()


def loaded_safely(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# As given, and as the same value in plain data.
VALUES = {
    "float64": ("weight_decay", np.float64(0.05), 0.05),
    "float32": ("momentum", np.float32(0.5), 0.5),
    "int64": ("ns_steps", np.int64(3), 3),
    "bool_": ("nesterov", np.bool_(False), False),
    "array of no dims": ("eps", np.array(1e-6), 1e-6),
    "str_": ("ns_coefficients", np.str_("polar_express"), "polar_express"),
    "an enum of str": ("adjust_lr_fn", Scale.MATCH, "match_rms_adamw"),
    "an enum of int": ("ns_steps", Steps.FOUR, 4),
    "a list of a configuration": (
        "ns_coefficients",
        ListConfig(ListConfig(3.0, -4.0, 2.0), ListConfig(3.0, -3.2, 1.2)),
        [[3.0, -4.0, 2.0], [3.0, -3.2, 1.2]],
    ),
    "a list of a configuration as betas": ("betas", ListConfig(0.8, np.float64(0.9)), [0.8, 0.9]),
    "a tensor": ("weight_decay", torch.tensor([0.05]), 0.05),
    "a mapping of others": ("schedule", DictConfig(warmup=np.int32(3)), {"warmup": 3}),
    "a NumPy array of others": ("layer_scales", np.array([1.0, 2.0]), [1.0, 2.0]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_plain_and_steps_are_those_of_the_plain_value(name):
    # torch.load(weights_only=True) refused the checkpoint.
    key, value, expected = VALUES[name]
    options = {"ns_steps": 2} if "list of a configuration" == name else {}
    params, optimizer = one(**{key: value}, **options)
    plain_params, plain = one(**{key: expected}, **options)
    for each, of in ((params, optimizer), (plain_params, plain)):
        train(each, of, range(2))
    assert all(torch.equal(a, b) for a, b in zip(params, plain_params, strict=True))
    saved = loaded_safely(optimizer.state_dict())["param_groups"][0][key]
    if isinstance(expected, float):
        assert math.isclose(saved, expected, rel_tol=1e-6)
    else:
        assert (list(saved) if isinstance(saved, tuple) else saved) == expected
    assert type(saved) in {float, int, bool, str, list, tuple, dict}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_is_written_into_a_group_later_is_saved_as_plain_data(name):
    key, value, _ = VALUES[name]
    params, optimizer = one(**({"ns_steps": 2} if "list of a configuration" == name else {}))
    train(params, optimizer, [0])
    optimizer.param_groups[0][key] = value
    optimizer.param_groups[1]["lr"] = np.float64(0.01)  # as schedulers do
    train(params, optimizer, [1])
    state_dict = loaded_safely(optimizer.state_dict())
    assert type(state_dict["param_groups"][1]["lr"]) is float
    _, fresh = one()
    fresh.load_state_dict(state_dict)


def test_a_scheduler_that_computes_with_numpy_leaves_a_plain_checkpoint():
    params, optimizer = one()
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: np.cos(np.float64(step)) ** 2
    )
    for step in range(3):
        train(params, optimizer, [step])
        scheduler.step()
    groups = loaded_safely(optimizer.state_dict())["param_groups"]
    assert {type(group["lr"]) for group in groups} == {float}


# What others keep


FOREIGN_KEYS = {"lr_scale": 0.5, "group_name": "body", "rho": 0.05, "lr_mult": [1, 2]}


def test_foreign_keys_and_state_survive_a_save_and_a_load():
    params, optimizer = one(**FOREIGN_KEYS)
    train(params, optimizer, range(2))
    for p in params:
        optimizer.state[p]["old_p"] = p.detach().clone()
        optimizer.state[p]["num_calls"] = 7
    train(params, optimizer, [2])
    state_dict = loaded_safely(optimizer.state_dict())
    fresh_params, fresh = one()
    with torch.no_grad():
        for p, q in zip(fresh_params, params, strict=True):
            p.copy_(q)
    fresh.load_state_dict(state_dict)
    for p, q in zip(fresh_params, params, strict=True):
        assert torch.equal(fresh.state[p]["old_p"], optimizer.state[q]["old_p"])
        assert fresh.state[p]["num_calls"] == 7
    assert FOREIGN_KEYS.items() <= fresh.param_groups[0].items()
    for each, of in ((params, optimizer), (fresh_params, fresh)):
        train(each, of, [3])
    assert all(torch.equal(a, b) for a, b in zip(params, fresh_params, strict=True))


def test_foreign_state_alone_neither_hides_nor_stops_a_fresh_start():
    params, optimizer = one()
    state_dict = optimizer.state_dict()
    state_dict["state"] = {0: {"old_p": torch.ones(6, 4)}}
    fresh_params, fresh = one()
    fresh.load_state_dict(copy.deepcopy(state_dict))
    assert torch.equal(fresh.state[fresh_params[0]]["old_p"], torch.ones(6, 4))
    for each, of in ((params, optimizer), (fresh_params, fresh)):
        train(each, of, range(2))
    assert all(torch.equal(a, b) for a, b in zip(params, fresh_params, strict=True))


def test_an_empty_group_keeps_its_place():
    weight = nn.Parameter(seeded((4, 3), 0))
    groups = [{"params": [], "lr": 0.5, "group_name": "none"}, {"params": [weight]}]
    optimizer = dmuon.Muon(groups)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 0.5, lambda _: 2.0])
    train([weight], optimizer, [0])
    scheduler.step()
    fresh = dmuon.Muon([{"params": []}, {"params": [weight]}])
    fresh.load_state_dict(loaded_safely(optimizer.state_dict()))
    assert [group["lr"] for group in fresh.param_groups] == [0.25, 0.002]


def train_with_zero():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about `torch.jit`
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415
    names = ("a", "b", "c", "d")
    shapes = ((8, 6), (4, 4), (5,), (3, 3))
    runs = []
    for wrapped in (True, False):
        params = {n: nn.Parameter(seeded(s, 3)) for n, s in zip(names, shapes, strict=True)}
        groups = [
            {"params": [params["a"]]},
            {"params": [params["b"], params["d"]], "momentum": 0.8},
            {"params": [params["c"]], "algorithm": "adamw", "use_muon": False},
        ]
        if wrapped:
            optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=dmuon.Muon, lr=LR)
        else:
            optimizer = dmuon.Muon(groups, lr=LR)
        for step in range(3):
            for i, p in enumerate(params.values()):
                p.grad = seeded(tuple(p.shape), step, i)
            optimizer.step()
            if wrapped:
                optimizer.consolidate_state_dict(to=0)
        if wrapped and dist.get_rank() == 0:
            assert len(optimizer.state_dict()["state"]) == 4
        runs.append({n: p.detach().clone() for n, p in params.items()})
    assert_near(*runs, tolerance=0)


def test_zero_redundancy_optimizer_trains_as_one_process(run_ranks):
    # It died, because a group that is empty on one rank had vanished there.
    run_ranks(2, train_with_zero)


# Guards


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_cap_mb": math.inf}, "bucket_cap_mb"),
        ({"bucket_cap_mb": math.nan}, "bucket_cap_mb"),
        ({"weight_decay": torch.tensor([0.1, 0.2])}, "weight_decay"),
        ({"adjust_lr_fn": lambda m, n: max(1, m / n)}, "adjust_lr_fn"),
        ({"adjust_lr_fn": lambda: 1.0}, "adjust_lr_fn"),
        ({"adjust_lr_fn": lambda shape: "large"}, "adjust_lr_fn"),
        ({"momentum": torch.tensor([0.9, 0.8])}, "momentum"),
        ({"nesterov": "no"}, "nesterov"),
    ],
)
def test_what_would_fail_in_a_step_is_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        dmuon.Muon([nn.Parameter(torch.ones(4, 3))], **options)


def test_a_step_without_any_gradient_of_muons_passes_once_there_were_some():
    params, optimizer = one()
    train(params, optimizer, [0])
    weight, bias = params
    before = weight.detach().clone()
    momentum = optimizer.state[weight]["momentum_buffer"].clone()
    weight.grad, bias.grad = None, torch.ones(5)
    old = bias.detach().clone()
    optimizer.step()
    assert torch.equal(weight, before)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], momentum)
    assert not torch.equal(bias, old)
