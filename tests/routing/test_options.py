"""Options by rule or name, names of groups, no decay, and what routing says of the unknown."""

import pytest
import torch
from torch import nn

import dmuon
from dmuon.routing.rules import RULES, param_groups
from tests.routing.test_rules import holder, linear, on_muon, routes, rules, tree


def model():
    attn = tree(c_attn=linear(8, 8, bias=True), c_proj=linear(8, 8))
    vit = holder(pos_embed=(1, 5, 8), reg_token=(1, 4, 8))
    return tree(
        tok=nn.Embedding(11, 8),
        vit=vit,
        blocks=nn.ModuleList([tree(attn=attn, ln=nn.LayerNorm(8)), tree(attn=linear(8, 8))]),
        lm_head=linear(11, 8),
    )


def test_options_by_rule_and_by_name():
    options = {
        "norm": {"weight_decay": 0.0},
        "embedding": {"lr": 3e-3},
        "*.c_attn": {"lr": 0.5, "momentum": 0.9},
        "c_attn.weight": {"lr": 0.25},
    }
    found = routes(model(), options=options, adamw_options={"lr": 1e-3})
    assert found["blocks.0.ln.weight"]["weight_decay"] == 0.0
    assert found["blocks.0.ln.weight"]["lr"] == 1e-3
    assert found["tok.weight"]["lr"] == 3e-3
    assert "lr" not in found["blocks.1.attn.weight"]
    weight, bias = found["blocks.0.attn.c_attn.weight"], found["blocks.0.attn.c_attn.bias"]
    assert (weight["lr"], weight["momentum"], bias["lr"]) == (0.25, 0.9, 0.5)
    assert found["lm_head.weight"]["lr"] == 1e-3


def test_names_win_over_rules_wherever_they_stand():
    options = {"lm_head": {"lr": 1.0}, "head": {"lr": 2.0, "weight_decay": 0.0}}
    group = routes(model(), options=options)["lm_head.weight"]
    assert (group["lr"], group["weight_decay"]) == (1.0, 0.0)


def test_every_group_has_a_short_name_of_its_own():
    groups = param_groups(
        model(),
        adamw=["c_proj"],
        split={"c_attn": (4, 4)},
        options={"blocks.1": {"lr": 0.1}, "norm": {"lr": 0.2}},
    )
    names = [group["name"] for group in groups]
    assert names == [
        *("matrix", "matrix blocks.1"),
        *("embedding", "table", "bias", "adamw (c_proj)", "norm", "head"),
    ]
    optimizer = dmuon.Muon(groups, lr=0.02)
    assert [group["name"] for group in optimizer.state_dict()["param_groups"]] == names


def test_no_decay_leaves_out_norms_biases_vectors_and_tables():
    model_ = model()
    model_.scale = nn.Parameter(torch.ones(8))
    spared = {
        fqn for fqn, group in routes(model_, no_decay=True).items() if "weight_decay" in group
    }
    assert spared == {
        *("vit.pos_embed", "vit.reg_token", "scale"),
        *("blocks.0.attn.c_attn.bias", "blocks.0.ln.weight", "blocks.0.ln.bias"),
    }
    found = routes(model_, no_decay=True, options={"norm": {"weight_decay": 0.5, "lr": 1.0}})
    assert found["blocks.0.ln.weight"]["weight_decay"] == 0.5
    assert found["vit.pos_embed"]["weight_decay"] == 0.0


@pytest.mark.parametrize("key", ["name", "params", "rule", "use_muon"])
def test_options_cannot_replace_what_routing_sets(key):
    with pytest.raises(ValueError, match=rf"\['{key}'\] are set by routing"):
        param_groups(model(), options={"norm": {key: 1}})


def test_option_for_a_name_that_is_not_there_raises_and_for_a_rule_does_not():
    with pytest.raises(
        ValueError, match=r"'c_atn' matches no trainable parameter; close: .*c_attn"
    ):
        param_groups(model(), options={"c_atn": {"lr": 1.0}})
    assert param_groups(linear(4, 4), options={"norm": {"lr": 1.0}})[0]["name"] == "matrix"


def test_every_rule_that_a_model_meets_can_be_named():
    zoo = tree(
        **{"conv": nn.Conv2d(3, 8, 3), "depthwise": nn.Conv2d(8, 8, 3, groups=8)},
        **{"attn": nn.MultiheadAttention(8, 2), "rnn": nn.GRU(8, 8), "body": model()},
        raw=holder(mystery=(4, 4), experts=(2, 4, 4), scale=(4,)),
    )
    zoo.deeper = nn.Conv2d(8, 8, 3)
    assert set(rules(zoo).values()) == RULES


def test_unknown_raw_parameters_are_doubtful_and_strict_refuses_them():
    odd = tree(layer=linear(4, 4), raw=holder(mystery=(4, 4), riddle=(2, 4, 4), weight=(4, 4)))
    assert on_muon(odd) == {"layer.weight", "raw.weight"}
    assert rules(odd)["raw.mystery"] == rules(odd)["raw.riddle"] == "doubtful"
    with pytest.raises(ValueError, match=r"^raw\.mystery, raw\.riddle: nothing tells .*muon= or"):
        param_groups(odd, strict=True)
    known = param_groups(odd, strict=True, muon=["mystery"], adamw=["riddle"])
    assert sum(len(group["params"]) for group in known) == 4


def test_strict_names_five_and_counts_the_rest():
    odd = holder(**{name * 5: (4, 4) for name in "abcdefg"})
    with pytest.raises(ValueError, match=r"eeeee and 2 more: nothing"):
        param_groups(odd, strict=True)


def test_input_layers_can_go_to_muon():
    vision = tree(stem=nn.Conv2d(3, 8, 3), deeper=nn.Conv2d(8, 8, 3), x_embedder=linear(8, 5))
    assert on_muon(vision) == {"deeper.weight"}
    assert rules(vision)["stem.weight"] == rules(vision)["x_embedder.weight"] == "input"
    assert on_muon(vision, input="muon") == {"stem.weight", "deeper.weight", "x_embedder.weight"}
    with pytest.raises(ValueError, match="input must be 'adamw' or 'muon', got 'no'"):
        param_groups(vision, input="no")


def test_model_given_to_muon_goes_through_param_groups():
    made = model()
    direct, routed = dmuon.Muon(made, lr=0.02), dmuon.Muon(param_groups(made), lr=0.02)
    assert direct.param_groups == routed.param_groups
    assert direct.param_groups[0]["param_names"][0].startswith("blocks.0")
