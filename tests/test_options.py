"""What a parameter group may contain, and what is said when it may not."""

import re

import pytest
import torch
from torch import nn

import dmuon
from dmuon.algorithms import lr_scale
from dmuon.options import ADAMW_EPS, check_names, normalize_group, param_names

DEFAULTS = dmuon.Muon([torch.zeros(2, 2)]).defaults


def weight(*shape, **options):
    return nn.Parameter(torch.ones(shape or (4, 4), **options))


def optimizer_with(**group):
    """An optimizer whose second group is the one under test."""
    group = {"params": [("second", weight())]} | group
    return dmuon.Muon([{"params": [("first", weight())]}, group])


@pytest.mark.parametrize(("algorithm", "use_muon"), [("muon", True), ("adamw", False)])
def test_algorithm_is_another_name_of_use_muon(algorithm, use_muon):
    group = optimizer_with(algorithm=algorithm).param_groups[1]
    assert group["use_muon"] is use_muon
    assert group["algorithm"] == algorithm
    assert optimizer_with(use_muon=use_muon).param_groups[1]["algorithm"] == algorithm
    both = optimizer_with(algorithm=algorithm, use_muon=use_muon).param_groups[1]
    assert {**both, "params": None} == {**group, "params": None}


def test_group_of_adamw_has_adamws_eps_and_the_defaults_otherwise():
    muon, adamw = optimizer_with(use_muon=False).param_groups
    assert (muon["eps"], adamw["eps"]) == (1e-7, ADAMW_EPS)
    assert adamw["eps"] == torch.optim.AdamW([weight()]).defaults["eps"]
    assert optimizer_with(use_muon=False, eps=1e-3).param_groups[1]["eps"] == 1e-3
    assert adamw["betas"] == torch.optim.AdamW([weight()]).defaults["betas"]


def test_users_group_is_not_modified():
    group = {"params": [weight()], "algorithm": "adamw"}
    before = dict(group)
    normalize_group(group, DEFAULTS, 0)
    assert group == before


BAD_VALUES = {
    "lr": [-0.1, float("nan"), "fast", torch.ones(2)],
    "weight_decay": [-1.0, None],
    "momentum": [1.0, -0.1, None],
    "eps": [-1e-8, "small"],
    "betas": [(0.9,), (0.9, 1.0), 0.9],
    "ns_steps": [0, 100, 2.5, "five"],
    "ns_coefficients": ["unknown", (1.0, 2.0), 3, ()],
    "adjust_lr_fn": ["unknown", 3, ["original"]],
    "ns_dtype": [torch.int32, "float32"],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in BAD_VALUES.items() for value in values]
)
def test_bad_value_is_an_error_that_names_the_group_or_the_optimizer(key, value):
    with pytest.raises(ValueError, match=f"parameter group 1: .*{key}"):
        optimizer_with(**{key: value})
    with pytest.raises(ValueError, match=f"Muon: .*{key}"):
        dmuon.Muon([weight()], **{key: value})


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"algorithm": "adam"}, "parameter group 1: algorithm 'adam' is unknown; use one of muon"),
        (
            {"algorithm": "adamw", "use_muon": True},
            "parameter group 1: algorithm 'adamw' contradicts use_muon=True",
        ),
        ({"params": [("bias", weight(24))]}, "bias: Muon needs a matrix"),
        ({"params": [("ids", torch.zeros(4, 4, dtype=torch.int64))]}, "ids: dtype torch.int64"),
        ({"params": [("z", torch.zeros(4, 4, dtype=torch.complex64))]}, "z: dtype torch.complex64"),
        ({"split": (3, 3)}, "second: cannot split shape (4, 4) into (3, 3)"),
        ({"params": [("first", weight())]}, "first: two parameters have this name"),
    ],
)
def test_bad_group_is_an_error_that_names_the_group_or_the_parameter(group, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer_with(**group)


@pytest.mark.parametrize("key", ["weight_decy", "momentums", "ns_step"])
def test_a_near_miss_of_a_hyperparameter_is_kept_with_a_warning(key):
    with pytest.warns(UserWarning, match=f"group 1: '{key}' is no hyperparameter .* meant"):
        assert optimizer_with(**{key: 0.9}).param_groups[1][key] == 0.9


@pytest.mark.parametrize("key", ["lr_scale", "lr_mult", "group_name", "rho"])
def test_keys_of_others_stay_in_their_group(key):
    assert optimizer_with(**{key: 0.9}).param_groups[1][key] == 0.9


def test_flat_parameter_of_fsdp1_is_an_error_that_names_the_remedy():
    with pytest.raises(ValueError, match=r"^layers\.0\.weight: .*FSDP1.*fully_shard"):
        dmuon.Muon([("layers.0.weight", weight(24))])


def test_split_that_fits_only_some_parameters_of_a_group_is_an_error():
    members = [("narrow", weight(4, 4)), ("tall", weight(8, 4))]
    with pytest.raises(ValueError, match=r"tall: split .* put them in separate groups"):
        dmuon.Muon([{"params": members, "split": dmuon.Split.equal(2)}])


def test_split_is_resolved_to_plain_data():
    group = optimizer_with(split=dmuon.Split.equal(2, dim=1)).param_groups[1]
    assert group["split"] == ((2, 2), 1)


@pytest.mark.parametrize(
    "bad",
    [
        {"params": [weight(3)]},
        {"params": [weight()], "lr": -1.0},
        {"params": [weight()], "lr": "fast"},
        {"params": [weight()], "algorithm": "unknown"},
        {"params": [weight()], "split": (9,)},
    ],
)
def test_failed_add_param_group_leaves_the_optimizer_unchanged(bad):
    first = weight()
    optimizer = dmuon.Muon([first])
    groups, state = list(optimizer.param_groups), dict(optimizer.state)
    with pytest.raises((TypeError, ValueError)):
        optimizer.add_param_group(bad)
    assert optimizer.param_groups == groups
    assert dict(optimizer.state) == state
    first.grad = torch.ones(4, 4)
    optimizer.step()
    assert optimizer.stats.ns_matrices == 1


def test_parameter_is_named_as_given_or_by_its_place():
    named, unnamed = {"params": [1], "param_names": ["w"]}, {"params": [1, 2]}
    assert param_names(named, 0) == ["w"]
    assert param_names(unnamed, 3) == [
        "param_groups[3]['params'][0]",
        "param_groups[3]['params'][1]",
    ]


def test_equal_names_are_an_error():
    check_names(["a", "b"])
    with pytest.raises(ValueError, match="b: two parameters have this name"):
        check_names(["a", "b", "b"])


def test_function_is_not_asked_about_made_up_shapes():
    asked = []

    def scale(shape):
        asked.append(shape)
        return 1.0

    parameter = weight(6, 4)
    optimizer = dmuon.Muon([parameter], adjust_lr_fn=scale)
    parameter.grad = torch.ones(6, 4)
    optimizer.step()
    assert set(asked) == {(6, 4)}
    assert lr_scale(scale, (6, 4)) == 1.0


def test_a_list_that_diverges_in_the_dtype_of_newton_schulz_is_refused():
    weight = nn.Parameter(torch.randn(8, 32))
    options = {"ns_dtype": torch.bfloat16, "ns_coefficients": "cans"}
    with pytest.raises(ValueError, match=r"ns_dtype torch\.bfloat16: .*diverges"):
        dmuon.Muon([weight], **options)
    with pytest.raises(ValueError, match=r"group 0: ns_dtype torch\.float16: .*diverges"):
        dmuon.Muon([{"params": [weight], **options, "ns_dtype": torch.float16}])
    # float32 on CPU.
    optimizer = dmuon.Muon([("w", weight)], ns_coefficients="cans")
    weight.grad = torch.randn(8, 32)
    optimizer.step()
    # Changed later: the step names the group.
    optimizer.param_groups[0]["ns_dtype"] = torch.bfloat16
    with pytest.raises(ValueError, match=r"group 0: ns_dtype torch\.bfloat16: .*diverges"):
        optimizer.step()
