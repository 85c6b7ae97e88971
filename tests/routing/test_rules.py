"""Routing: cases R01-R04, R06-R08, R46, R49, R51, R54 and R67, as far as routing decides them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import weight_norm

from dmuon.routing.rules import Split, param_groups, resolve_split


def tensor(*shape):
    return nn.Parameter(torch.zeros(shape))


def holder(class_name="Holder", **shapes):
    """A module of its own class that holds the given parameters directly."""
    module = type(class_name, (nn.Module,), {})()
    for name, shape in shapes.items():
        module.register_parameter(name, tensor(*shape))
    return module


def tree(**children):
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def linear(rows, columns, bias=False):
    return nn.Linear(columns, rows, bias=bias)


def routes(model, **kwargs):
    return {fqn: group for group in param_groups(model, **kwargs) for fqn, _ in group["params"]}


def rules(model, **kwargs):
    return {fqn: group["rule"] for fqn, group in routes(model, **kwargs).items()}


def on_muon(model, **kwargs):
    return {fqn for fqn, group in routes(model, **kwargs).items() if group["use_muon"]}


@pytest.mark.parametrize("attribute", ["tok", "wte", "markov"])
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_go_to_adamw_whatever_their_names(attribute, tied):
    model = tree(**{attribute: nn.Embedding(11, 6), "hidden": linear(6, 6), "last": linear(11, 6)})
    if tied:
        model.last.weight = getattr(model, attribute).weight
    assert on_muon(model) == {"hidden.weight"}
    expected = {f"{attribute}.weight": "embedding", "hidden.weight": "matrix"}
    assert rules(model) == expected | ({} if tied else {"last.weight": "head"})


def test_embedding_and_head_in_a_sequential():
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11))
    assert on_muon(model) == {"1.weight"}


def test_tie_decides_for_every_use_even_when_the_first_is_an_ordinary_weight():
    model = tree(project=linear(6, 4), odd=nn.Embedding(6, 4))
    model.project.weight = model.odd.weight
    assert rules(model) == {"project.weight": "embedding"}


def test_shared_module_is_judged_by_all_its_names():
    shared = linear(6, 6)
    assert rules(tree(block=shared, lm_head=shared)) == {"block.weight": "head"}


def test_embedding_subclasses_and_own_classes_and_direct_parameters():
    model = tree(
        bag=nn.EmbeddingBag(5, 4),
        own=holder("VocabEmbedding", weight=(5, 4)),
        plural=holder("PatchEmbeddings", rows=(5, 4)),
        vit=holder(pos_embed=(1, 5, 4), embedder_gate=(5, 4)),
    )
    assert on_muon(model) == {"vit.embedder_gate"}
    found = rules(model)
    assert found.pop("vit.pos_embed") == "table"
    assert found.pop("vit.embedder_gate") == "matrix"
    assert set(found.values()) == {"embedding"}


def test_embedding_class_does_not_claim_the_modules_it_holds():
    timestep = holder("TimestepEmbedding")
    timestep.linear_1 = linear(8, 4)
    assert rules(timestep) == {"linear_1.weight": "matrix"}


def test_adapters_of_an_embedding_held_in_a_parameter_dict_are_embeddings():
    layer = tree(lora_embedding_A=nn.ParameterDict({"default": tensor(2, 9)}))
    assert rules(layer) == {"lora_embedding_A.default": "embedding"}


@pytest.mark.parametrize(
    "name", ["head", "heads", "output", "classifier", "score", "lm_head", "embed_out", "value_head"]
)
def test_head_is_known_by_its_name_at_the_top(name):
    block = tree(**{name: linear(6, 6)}) if name not in ("lm_head", "embed_out") else linear(6, 6)
    model = tree(block=block, **{name: linear(10, 6)})
    assert on_muon(model) == {fqn for fqn in rules(model) if fqn.startswith("block")}
    assert rules(tree(model=model))[f"model.{name}.weight"] == "head"


def test_lm_head_is_a_head_at_any_depth_and_its_bias_is_a_bias():
    model = tree(mtp=nn.ModuleList([tree(lm_head=linear(10, 6, bias=True))]))
    assert rules(model) == {"mtp.0.lm_head.weight": "head", "mtp.0.lm_head.bias": "bias"}


def test_mlp_with_the_shape_of_the_embedding_stays_on_muon():
    blocks = nn.ModuleList([tree(up=linear(256, 64), down=linear(64, 256)) for _ in range(2)])
    model = tree(tok=nn.Embedding(256, 64), blocks=blocks, last=linear(256, 64))
    assert on_muon(model) == {
        f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")
    }


def test_position_embedding_does_not_make_heads():
    model = tree(wte=nn.Embedding(50, 8), wpe=nn.Embedding(16, 8), up=linear(16, 8))
    assert on_muon(model) == {"up.weight"}


class HuggingFaceStyle(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = tree(layer=linear(6, 6))
        self.cls = tree(predictions=linear(9, 6))

    def get_output_embeddings(self):
        return self.cls.predictions


def test_declared_output_embeddings_are_the_head():
    model = tree(base_model=tree(model=HuggingFaceStyle()))
    assert on_muon(model) == {"base_model.model.backbone.layer.weight"}
    assert rules(model)["base_model.model.cls.predictions.weight"] == "head"


def test_stage_whose_declared_head_was_removed_is_routed():
    model = HuggingFaceStyle()
    del model.cls
    assert on_muon(model) == {"backbone.layer.weight"}


def test_pipeline_stages_decide_alone_as_the_whole_model_does():
    embedding, head = nn.Embedding(16, 4), linear(16, 4)
    layers = [tree(up=linear(16, 4), down=linear(4, 16)) for _ in range(2)]
    head.weight = embedding.weight
    whole = rules(
        tree(tok=embedding, layers=nn.ModuleDict({"0": layers[0], "1": layers[1]}), lm_head=head)
    )
    first = rules(tree(tok=nn.Embedding(16, 4), layers=nn.ModuleDict({"0": layers[0]})))
    last = routes(tree(layers=nn.ModuleDict({"1": layers[1]}), lm_head=linear(16, 4)))
    copy = routes(tree(tok=nn.Embedding(16, 4), layers=nn.ModuleDict({"1": layers[1]})))
    assert first.items() <= whole.items()
    assert not last["lm_head.weight"]["use_muon"]
    assert not copy["tok.weight"]["use_muon"]
    for name in ("layers.1.up.weight", "layers.1.down.weight"):
        assert last[name]["rule"] == copy[name]["rule"] == whole[name] == "matrix"


def test_vectors_in_disguise_go_to_adamw():
    model = holder(
        a=(8, 1, 1), b=(1, 8), c=(8, 1), d=(1, 1, 8), w=(4, 4), f=(8,), g=(), h=(3, 8, 1)
    )
    assert on_muon(model) == {"w"}
    assert {rule for fqn, rule in rules(model).items() if fqn != "w"} == {"vector"}


def test_norms_and_biases_go_to_adamw():
    model = tree(
        layer=nn.LayerNorm((4, 6)),
        rms=nn.RMSNorm(4),
        group=nn.GroupNorm(2, 4),
        batch=nn.BatchNorm2d(4),
        instance=nn.InstanceNorm1d(4, affine=True),
        own=holder("LlamaRMSNorm", gain=(4, 6)),
        experts=holder(up_proj=(3, 4, 6), up_proj_bias=(3, 4)),
    )
    found = rules(model)
    assert found.pop("experts.up_proj") == "stack"
    assert found.pop("experts.up_proj_bias") == "bias"
    assert set(found.values()) == {"norm"}


@pytest.mark.parametrize(
    "conv",
    [nn.Conv1d(4, 6, 3), nn.Conv2d(3, 8, 3), nn.Conv3d(3, 8, 3), nn.ConvTranspose2d(3, 8, 3)],
)
def test_convolution_is_a_flattened_matrix(conv):
    route = routes(conv)["weight"]
    assert route["use_muon"]
    assert (route["rule"], route["flatten"], route["split"]) == ("conv", True, None)
    assert rules(conv)["bias"] == "bias"


@pytest.mark.parametrize(
    "conv", [nn.Conv2d(8, 4, 3, groups=2), nn.ConvTranspose2d(4, 8, 3, groups=2)]
)
def test_grouped_convolution_splits_rows_by_group(conv):
    assert routes(conv)["weight"]["split"] == ((2, 2), 0)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 8, 3, groups=4),
        nn.Conv1d(8, 4, 3, groups=4),
        nn.ConvTranspose2d(8, 4, 3, groups=4),
    ],
)
def test_depthwise_convolution_goes_to_adamw(conv):
    assert rules(conv)["weight"] == "depthwise conv"
    assert on_muon(conv) == set()


def test_convolution_with_one_output_channel_is_a_vector_and_with_one_input_is_not():
    assert rules(nn.Conv2d(3, 1, 3, bias=False)) == {"weight": "vector"}
    assert rules(nn.Conv2d(1, 8, 3, bias=False)) == {"weight": "conv"}


def test_weight_normed_convolution_is_still_a_convolution():
    model = tree(conv=weight_norm(nn.Conv2d(3, 8, 3, bias=False)))
    found = rules(model, input="muon")
    assert found == {
        "conv.parametrizations.weight.original0": "vector",
        "conv.parametrizations.weight.original1": "conv",
    }


def test_torch_modules_with_fused_weights_are_split():
    model = tree(
        attention=nn.MultiheadAttention(6, 2, bias=False),
        lstm=nn.LSTM(4, 5, bias=False),
        gru=nn.GRU(4, 5, bias=False),
        rnn=nn.RNN(4, 5, bias=False),
        cell=nn.LSTMCell(4, 5, bias=False),
    )
    found = {fqn: group["split"] for fqn, group in routes(model).items()}
    assert found == {
        "attention.in_proj_weight": ((6, 6, 6), 0),
        "attention.out_proj.weight": None,
        "lstm.weight_ih_l0": ((5,) * 4, 0),
        "lstm.weight_hh_l0": ((5,) * 4, 0),
        "gru.weight_ih_l0": ((5,) * 3, 0),
        "gru.weight_hh_l0": ((5,) * 3, 0),
        "rnn.weight_ih_l0": None,
        "rnn.weight_hh_l0": None,
        "cell.weight_ih": ((5,) * 4, 0),
        "cell.weight_hh": ((5,) * 4, 0),
    }


def test_expert_and_layer_stacks_are_batches_of_matrices():
    model = holder(experts=(4, 6, 8), layers=(2, 3, 4, 5))
    for route in routes(model).values():
        assert route["use_muon"]
        assert (route["rule"], route["flatten"], route["split"]) == ("stack", False, None)


def test_equal_modules_with_different_names_are_treated_alike():
    model = tree(
        moe_block=holder(w1=(4, 6, 8)),
        routed_experts=holder(w1=(4, 6, 8)),
        attn_gated_norm=holder(up=(8, 4)),
        mlp_gated_norm=holder(up=(8, 4)),
    )
    found = rules(model)
    assert found["moe_block.w1"] == found["routed_experts.w1"] == "stack"
    assert found["attn_gated_norm.up"] == found["mlp_gated_norm.up"] == "matrix"


def attention_layers():
    layer = {"wq": linear(4, 4), "wqkv": linear(8, 4), "dense_4h_to_h": linear(8, 4)}
    return tree(layers=nn.ModuleList([tree(attn=tree(**layer)), tree(attn=linear(4, 4))]))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("wq", {"layers.0.attn.wq.weight"}),
        ("attn.wq", {"layers.0.attn.wq.weight"}),
        ("layers.0.attn.wq.weight", {"layers.0.attn.wq.weight"}),
        ("layers.1", {"layers.1.attn.weight"}),
        ("layers.*.attn.weight", {"layers.1.attn.weight"}),
        ("_orig_mod.layers.1", {"layers.1.attn.weight"}),
        (lambda fqn, p: p.shape[0] == 8 and "qkv" in fqn, {"layers.0.attn.wqkv.weight"}),
    ],
)
def test_rules_match_whole_segments_or_by_predicate(rule, expected):
    model = attention_layers()
    assert set(rules(model)) - on_muon(model, adamw=[rule]) == expected


@pytest.mark.parametrize("rule", ["w", "attn.w", "h_to_h", "layers.wq", "", "wq*"])
def test_rule_that_matches_nothing_raises(rule):
    with pytest.raises(ValueError, match="matches no trainable parameter"):
        param_groups(attention_layers(), adamw=[rule])


def test_rule_that_matches_nothing_names_close_parameters():
    with pytest.raises(ValueError, match=r"'attn\.wqk' matches .*layers\.0\.attn\.wqkv\.weight"):
        param_groups(attention_layers(), muon=["attn.wqk"])
    with pytest.raises(ValueError, match=r"'never' matches .*parameters are: layers\.0"):
        param_groups(attention_layers(), muon=[never])
    with pytest.raises(ValueError, match=r"'wqk' matches .*wqkv"):
        param_groups(attention_layers(), split={"wqk": (4, 4)})


def never(fqn, parameter):
    return False


def test_single_rule_given_without_a_list_is_one_rule():
    assert (
        rules(attention_layers(), adamw="wq")["layers.0.attn.wq.weight"] == "override: adamw (wq)"
    )


def test_overrides_win_and_say_so():
    model = tree(tok=nn.Embedding(8, 4), gate=linear(4, 4, bias=True), tall=linear(8, 1))
    found = routes(model, muon=["tok", "tall", "gate"])
    assert on_muon(model, muon=["tok", "tall", "gate"]) == {
        "tok.weight",
        "tall.weight",
        "gate.weight",
    }
    assert found["tok.weight"]["rule"] == "override: muon (tok)"
    assert found["gate.bias"]["rule"] == "bias"
    assert on_muon(model, muon=[lambda fqn, p: p.shape == (8, 1)]) == {"gate.weight", "tall.weight"}
    assert rules(model, adamw=[never_bias])["gate.weight"] == "override: adamw (never_bias)"


def never_bias(fqn, parameter):
    return not fqn.endswith("bias")


def test_override_keeps_the_layout_of_a_convolution():
    route = routes(nn.Conv2d(4, 8, 3, groups=4, bias=False), muon=["weight"])["weight"]
    assert (route["flatten"], route["split"]) == (True, ((2,) * 4, 0))


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ("gain", "gain: shape (8,)"),
        ("dots", "dots: shape (8, 1, 1)"),
        (lambda *_: True, "gain: shape"),
    ],
)
def test_forcing_muon_on_what_is_no_matrix_raises(rule, found):
    model = holder(gain=(8,), dots=(8, 1, 1), w=(4, 4))
    with pytest.raises(ValueError, match="holds no matrix") as error:
        param_groups(model, muon=[rule])
    assert str(error.value).startswith(found)


def test_contradicting_overrides_raise():
    with pytest.raises(
        ValueError, match=r"layers\.0\.attn\.wq\.weight: .*muon \(wq\).*adamw \(attn\)"
    ):
        param_groups(attention_layers(), muon=["wq"], adamw=["attn"])


def test_rule_of_another_type_raises():
    with pytest.raises(TypeError, match="rule 3 is neither"):
        param_groups(linear(4, 4), muon=[3])


def test_override_reaches_a_tied_parameter_by_any_name():
    model = tree(tok=nn.Embedding(8, 4), lm_head=linear(8, 4))
    model.lm_head.weight = model.tok.weight
    assert on_muon(model, muon=["lm_head"]) == {"tok.weight"}


def test_named_parameters_generator_is_read_once_and_warns():
    model = linear(4, 4, bias=True)
    with pytest.warns(UserWarning, match="by name only") as caught:
        muon, adamw = param_groups(model.named_parameters())
    assert caught[0].filename == __file__
    assert [fqn for fqn, _ in muon["params"]] == ["weight"]
    assert [fqn for fqn, _ in adamw["params"]] == ["bias"]


def test_named_parameters_know_embeddings_and_heads_by_name():
    names = ["tok_embeddings.weight", "wte.weight", "embed_tokens.weight", "pos_embed"]
    heads = ["lm_head.weight", "model.output.weight"]
    named = [(name, tensor(8, 4)) for name in [*names, *heads, "layers.0.output.weight"]]
    with pytest.warns(UserWarning, match="by name only"):
        found = rules(iter(named))
    assert [found[name] for name in names] == ["embedding"] * 3 + ["table"]
    assert [found[name] for name in heads] == ["head"] * 2
    assert found["layers.0.output.weight"] == "matrix"


@pytest.mark.parametrize(
    "wrong", [3, None, "model", [tensor(4, 4)], {"w": tensor(4, 4)}, [("w", torch.ones(2, 2))]]
)
def test_anything_else_is_a_type_error_with_the_fix(wrong):
    with pytest.raises(TypeError, match="pass the model"):
        param_groups(wrong)


def test_fused_qkv_splits_by_unequal_rows():
    model = tree(wqkv=linear(12, 16, bias=True))
    for blocks in ((8, 2, 2), [8, 2, 2], Split((8, 2, 2))):
        route = routes(model, split={"wqkv": blocks})["wqkv.weight"]
        assert route["split"] == ((8, 2, 2), 0)
        assert type(route["split"]) is tuple


def test_heads_are_split_on_the_chosen_axis_and_nothing_else_is():
    model = tree(q_proj=linear(8, 8), o_proj=linear(8, 8), dense_4h_to_h=linear(32, 8))
    found = routes(model, split={"q_proj": Split.equal(4), "o_proj": Split.equal(4, dim=1)})
    assert {fqn: route["split"] for fqn, route in found.items()} == {
        "q_proj.weight": ((2, 2, 2, 2), 0),
        "o_proj.weight": ((2, 2, 2, 2), 1),
        "dense_4h_to_h.weight": None,
    }


def test_splits_apply_to_the_matrix_of_a_stack_and_of_a_convolution():
    model = tree(experts=holder(gate_up=(3, 8, 5)), conv=nn.Conv2d(5, 8, 3, bias=False))
    found = routes(model, split={"gate_up": Split.equal(2), "conv": (6, 2)}, input="muon")
    assert found["experts.gate_up"]["split"] == ((4, 4), 0)
    assert found["conv.weight"]["split"] == ((6, 2), 0)


@pytest.mark.parametrize(
    ("shape", "split", "flatten", "message"),
    [
        ((12, 16), (8, 2), False, r"w: .*\(12, 16\) into \(8, 2\); .*sum to 12"),
        ((12, 16), (8, 5, -1), False, "positive sizes"),
        ((12, 16), (), False, "positive sizes"),
        ((12, 16), Split.equal(5), False, r"w: .*\(12, 16\) into 5 equal blocks; .*divisor of 12"),
        ((12, 16), Split.equal(0), False, "divisor"),
        ((12, 16), Split((8, 8), dim=2), False, "along dim 2"),
        ((12, 16), Split((8, 8), dim=-1), False, "along dim -1"),
        ((8, 3, 3, 3), Split.equal(3, dim=1), True, "by columns"),
        ((12,), (6, 6), False, "holds no matrix"),
        ((12, 16), 3, False, "neither a Split nor row sizes"),
        ((12, 16), "qkv", False, "neither a Split nor row sizes"),
    ],
)
def test_split_that_does_not_fit_raises(shape, split, flatten, message):
    with pytest.raises(ValueError, match=message):
        resolve_split("w", shape, split, flatten)


def test_resolved_split_resolves_to_itself():
    for split in (None, ((8, 2, 2), 0), ((8, 8), 1)):
        assert resolve_split("w", (12, 16), split, flatten=False) == split
    assert resolve_split("w", (12, 16), [[8, 8], 1], flatten=False) == ((8, 8), 1)
    assert resolve_split("w", (12, 16), (12,), flatten=False) is None


def test_split_of_an_adamw_parameter_raises():
    model = tree(tok=nn.Embedding(8, 4), proj=linear(8, 4, bias=True))
    with pytest.raises(ValueError, match=r"tok\.weight: .*\(8, 4\) goes to AdamW \(embedding\)"):
        param_groups(model, split={"tok": (4, 4)})
    with pytest.raises(ValueError, match=r"proj\.bias: .*AdamW \(bias\)"):
        param_groups(model, split={"proj.bias": (4, 4)})
    assert routes(model, muon=["tok"], split={"tok": (4, 4)})["tok.weight"]["split"] == ((4, 4), 0)


def test_two_split_keys_for_one_parameter_raise():
    with pytest.raises(ValueError, match=r"proj\.weight: split by both 'proj' and 'weight'"):
        param_groups(tree(proj=linear(8, 4)), split={"proj": (4, 4), "weight": (2, 6)})


def test_no_group_is_empty():
    frozen = nn.Sequential(linear(4, 4), nn.LayerNorm(4)).requires_grad_(False)
    groups = param_groups(tree(tower=frozen, new=linear(4, 4)))
    assert [[fqn for fqn, _ in group["params"]] for group in groups] == [["new.weight"]]
    assert param_groups(frozen) == []


def test_frozen_base_is_left_out_and_adapters_can_go_either_way():
    model = tree(base=linear(8, 8).requires_grad_(False), lora_A=linear(2, 8), lora_B=linear(8, 2))
    assert on_muon(model) == {"lora_A.weight", "lora_B.weight"}
    assert on_muon(model, adamw=["lora_B"]) == {"lora_A.weight"}
    with pytest.raises(ValueError, match="no trainable parameter"):
        param_groups(model, muon=["base"])


def test_groups_are_ordered_and_carry_options_and_plain_facts(tmp_path):
    model = tree(
        norm=nn.LayerNorm(4),
        first=linear(8, 4),
        conv=nn.Conv1d(8, 6, 3, bias=False),
        second=linear(4, 4),
    )
    groups = param_groups(
        model,
        split={"first": Split.equal(2)},
        muon_options={"lr": 0.02},
        adamw_options={"betas": (0.9, 0.95)},
    )
    facts = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    muon = {"use_muon": True, "lr": 0.02}
    assert facts == [
        {"name": "matrix", "rule": "matrix", **muon, "flatten": False, "split": ((4, 4), 0)},
        {"name": "conv", "rule": "conv", **muon, "flatten": True, "split": None},
        {"name": "matrix 2", "rule": "matrix", **muon, "flatten": False, "split": None},
        {"name": "norm", "rule": "norm", "use_muon": False, "betas": (0.9, 0.95)},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert optimizer.param_groups[3]["param_names"] == ["norm.weight", "norm.bias"]
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert loaded["param_groups"][0]["split"] == ((4, 4), 0)


def test_options_cannot_replace_what_routing_sets():
    with pytest.raises(ValueError, match=r"\['split'\] are set by routing"):
        param_groups(linear(4, 4), muon_options={"split": None})


def test_wrappers_leave_no_trace_in_names():
    block = torch.compile(checkpoint_wrapper(linear(4, 4)), backend="eager")
    model = tree(blocks=nn.ModuleList([block]), head=linear(9, 4))
    expected = {"blocks.0.weight": "matrix", "head.weight": "head"}
    assert rules(model) == expected
    compiled = torch.compile(model, backend="eager")
    assert rules(compiled) == expected
    assert rules(nn.DataParallel(compiled)) == expected
    assert rules(torch.compile(nn.DataParallel(model), backend="eager")) == expected
    assert rules(tree(module=linear(4, 4))) == {"module.weight": "matrix"}


def test_ddp_prefix_is_stripped(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(tree(layer=linear(4, 4), head=linear(9, 4)))
        assert rules(model) == {"layer.weight": "matrix", "head.weight": "head"}
    finally:
        torch.distributed.destroy_process_group()


def whole_model():
    return tree(
        tok=nn.Embedding(16, 4),
        conv=nn.Conv2d(4, 8, 3, groups=2),
        attention=nn.MultiheadAttention(4, 2),
        experts=holder(w=(3, 4, 4)),
        norm=nn.LayerNorm(4),
        last=linear(16, 4),
    )


def test_meta_model_is_routed_like_a_real_one():
    with torch.device("meta"):
        meta = whole_model()
    for groups in zip(param_groups(meta), param_groups(whole_model()), strict=True):
        facts, real_facts = ({k: v for k, v in g.items() if k != "params"} for g in groups)
        assert facts == real_facts
        assert [n for n, _ in groups[0]["params"]] == [n for n, _ in groups[1]["params"]]


def test_dtensor_is_routed_by_its_global_shape(tmp_path):
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    expected = rules(whole_model())
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (8,))
        model = fully_shard(whole_model(), mesh=mesh)
        assert model.attention.in_proj_weight.to_local().shape[0] < 3
        assert rules(model) == expected
    finally:
        torch.distributed.destroy_process_group()


def test_fsdp1_is_refused():
    with (
        pytest.warns(UserWarning, match="by name only"),
        pytest.raises(ValueError, match=r"_flat_param .*fully_shard"),
    ):
        param_groups([("layer._fsdp_wrapped_module._flat_param", tensor(16))])
    fsdp1 = type("FullyShardedDataParallel", (nn.Module,), {})()
    with pytest.raises(ValueError, match=r"'encoder' is FSDP1.*fully_shard"):
        param_groups(tree(encoder=fsdp1))


def test_lazy_parameter_is_refused():
    with pytest.raises(ValueError, match="weight has no shape yet"):
        param_groups(nn.LazyLinear(4))


LEAVES = (
    lambda: linear(4, 4, bias=True),
    lambda: nn.Embedding(4, 4),
    lambda: nn.LayerNorm(4),
    lambda: nn.Conv2d(4, 8, 3, groups=4),
    lambda: nn.ConvTranspose1d(4, 6, 2, groups=2),
    lambda: nn.MultiheadAttention(4, 2),
    lambda: nn.LSTM(2, 3),
    lambda: holder(w=(2, 3, 4), gain=(3, 1, 1), scale=()),
    lambda: nn.ParameterList([tensor(2, 2), tensor(0, 4)]),
)
modules = st.recursive(
    st.sampled_from(LEAVES).map(lambda make: make()),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(nn.ModuleList),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(module=modules, data=st.data())
def test_every_trainable_parameter_is_in_exactly_one_group(module, data):
    model = tree(a=module, b=linear(4, 4), c=module if data.draw(st.booleans()) else linear(2, 2))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.requires_grad_(data.draw(st.booleans()))
    if data.draw(st.booleans()):
        model.b.weight = parameters[0]
    groups = param_groups(model)
    routed = [pair for group in groups for pair in group["params"]]
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    assert {id(parameter): name for name, parameter in routed} == trainable
    assert len(routed) == len(trainable)
    assert all(group["params"] for group in groups)
    for group in groups:
        assert group["use_muon"] == ("split" in group) == ("flatten" in group)
        for fqn, parameter in group["params"] if group["use_muon"] else ():
            assert parameter.ndim >= 2
            split = resolve_split(fqn, parameter.shape, group["split"], group["flatten"])
            assert split == group["split"]
