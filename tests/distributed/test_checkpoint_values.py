"""What a load takes from a checkpoint, what it keeps, converts and refuses."""

import copy
import io
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from tests.distributed.test_checkpoint import load, save
from tests.support.parity import LR, seeded
from tests.support.topologies import (
    TOPOLOGIES,
    Weights,
    assert_same,
    build,
    state_of,
    train,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)
ONE = TOPOLOGIES["one process"]
OLD = Path(__file__).parents[1] / "data" / "checkpoint-0.1.pt"


def trained(seed=1, steps=2, **muon):
    model, optimizer = build(ONE, seed, **muon)
    train(model, optimizer, range(steps))
    return model, optimizer


def saved(optimizer):
    """The state dict after a trip through a file, read with `weights_only=True`."""
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    return torch.load(stream)


def test_a_plain_round_trip_is_bit_exact():
    model, optimizer = trained()
    copied = copy.deepcopy(optimizer.state_dict())
    fresh_model, fresh = build(ONE, seed=2, lr=7.0)
    fresh_model.load_state_dict(model.state_dict())
    fresh.load_state_dict(saved(optimizer))
    train(model, optimizer, range(2, 4))
    train(fresh_model, fresh, range(2, 4))
    assert_same(weights_of(fresh_model), weights_of(model))
    assert fresh.param_groups[0]["lr"] == LR

    fresh.load_state_dict(copied)
    assert fresh.state_dict()["state"][5]["step"] == 2


def test_a_checkpoint_of_this_version_of_the_format_still_loads():
    model, optimizer = build(ONE, seed=2)
    checkpoint = torch.load(OLD)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(model, optimizer, range(2, 3))
    for name, weight in weights_of(model).items():
        assert (weight - checkpoint["next"][name]).abs().max() <= 1e-5 * LR


def one_group(shape=(8, 12), *, seed=1, dtype=torch.float32, **options):
    weight = nn.Parameter(seeded(shape, seed).to(dtype))
    groups = [{"params": [("weight", weight)], **options}]
    return weight, dmuon.Muon(groups, **options.pop("muon", {}))


def step(weight, optimizer, seed=3, dtype=None):
    weight.grad_dtype = None
    weight.grad = seeded(tuple(weight.shape), seed).to(dtype or weight.dtype)
    optimizer.step()


def test_hyperparameters_are_loaded_and_facts_about_the_model_are_kept():
    _, before = one_group(split=(4, 4), rule="fused", lr=0.5, momentum=0.9, ns_dtype=torch.bfloat16)
    _, after = one_group(rule="matrix")
    after.load_state_dict(saved(before))
    (group,) = after.param_groups
    loaded = {"lr": 0.5, "momentum": 0.9, "ns_dtype": torch.bfloat16}
    kept = {"split": None, "rule": "matrix", "param_names": ["weight"], "use_muon": True}
    assert group.items() >= {**loaded}.items()
    assert {key: group[key] for key in kept} == kept


def test_a_load_does_not_add_group_keys():
    # Torch adds `differentiable` to what has loaded; a flattened load of an older state dict then
    # raises KeyError.
    _, before = one_group()
    _, after = one_group()
    after.load_state_dict(saved(before))
    assert after.param_groups[0].keys() == before.param_groups[0].keys()
    after.add_param_group({"params": [("other", nn.Parameter(seeded((3, 4), 5)))]})
    assert after.param_groups[1].keys() == before.param_groups[0].keys()


def test_hyperparameters_that_were_not_saved_stay():
    _, before = one_group()
    state_dict = saved(before)
    del state_dict["param_groups"][0]["nesterov"]
    _, after = one_group(nesterov=False)
    after.load_state_dict(state_dict)
    assert after.param_groups[0]["nesterov"] is False


def test_a_function_is_kept_where_it_was_saved_by_name():
    options = {"adjust_lr_fn": lambda shape: shape[0] ** 0.5}
    _, before = one_group(**options)
    _, after = one_group(**options)
    after.load_state_dict(saved(before))
    assert after.param_groups[0]["adjust_lr_fn"] is options["adjust_lr_fn"]
    _, without = one_group()
    with pytest.raises(ValueError, match=r"parameter group 0: .*<lambda>.*give the optimizer"):
        without.load_state_dict(saved(before))


DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("param", DTYPES)
@pytest.mark.parametrize("state", DTYPES)
def test_state_of_another_dtype_is_converted_and_steps(param, grad, state, use_muon):
    # R39: `lerp_` raised on the first step after a resume.
    weight, before = one_group(dtype=state, use_muon=use_muon)
    step(weight, before)
    weight, after = one_group(dtype=param, use_muon=use_muon)
    after.load_state_dict(saved(before))
    for key, value in before.state_dict()["state"][0].items():
        loaded = after.state_dict()["state"][0][key]
        assert loaded.dtype == (torch.float32 if key == "step" else param)
        assert torch.equal(loaded, value.to(loaded.dtype))
    step(weight, after, dtype=grad)
    assert weight.isfinite().all()


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("param", DTYPES)
@pytest.mark.parametrize("state", DTYPES)
def test_state_that_was_put_there_in_another_dtype_steps(param, state, use_muon):
    weight, optimizer = one_group(dtype=param, use_muon=use_muon)
    values = optimizer.state[weight]
    values.update({k: v.to(state) for k, v in values.items() if k != "step"})
    before = weight.detach().clone()
    step(weight, optimizer)
    assert not torch.equal(weight, before)


def test_state_of_the_other_algorithm_is_refused():
    weight, before = one_group(use_muon=False)
    step(weight, before)
    weight, after = one_group()
    step(weight, after)
    unchanged = copy.deepcopy(after.state_dict())
    with pytest.raises(ValueError, match="parameter group 0: it was saved as adamw and is muon"):
        after.load_state_dict(before.state_dict())
    state_dict = before.state_dict()
    del state_dict["param_groups"][0]["use_muon"], state_dict["param_groups"][0]["algorithm"]
    with pytest.raises(ValueError, match=r"weight: .* has exp_avg, .* not momentum_buffer"):
        after.load_state_dict(state_dict)
    assert torch.equal(
        after.state[weight]["momentum_buffer"], unchanged["state"][0]["momentum_buffer"]
    )


def test_state_of_another_shape_is_refused():
    _, before = one_group((8, 12))
    _, after = one_group((12, 8))
    with pytest.raises(ValueError, match=r"weight: momentum_buffer has shape \(8, 12\)"):
        after.load_state_dict(before.state_dict())


def test_another_order_of_parameters_is_refused():
    def optimizer(*names):
        return dmuon.Muon([(name, nn.Parameter(torch.ones(3, 4))) for name in names])

    with pytest.raises(ValueError, match=r"^a: .* with b in this place; load it by name"):
        optimizer("a", "b").load_state_dict(optimizer("b", "a").state_dict())
    optimizer("a", "b").load_state_dict(optimizer("module.a", "module.b").state_dict())


def test_a_parameter_without_saved_state_starts_afresh():
    weight, before = one_group()
    step(weight, before)
    state_dict = saved(before)
    state_dict["state"].clear()
    weight, after = one_group()
    step(weight, after)
    after.load_state_dict(state_dict)
    assert not after.state[weight]["momentum_buffer"].any()


def test_hooks_see_tensors():
    seen = []
    _, before = one_group()
    _, after = one_group()
    after.register_load_state_dict_pre_hook(lambda _, s: seen.append(s["state"][0]))
    after.register_load_state_dict_post_hook(lambda o: seen.append(o.state_dict()["state"][0]))
    after.load_state_dict(saved(before))
    assert [type(state["momentum_buffer"]) for state in seen] == [torch.Tensor] * 2


def load_whole(topology, state_dict, expected):
    model, optimizer = build(TOPOLOGIES[topology], seed=2)
    optimizer.load_state_dict(state_dict)
    assert_same(state_of(model, optimizer), expected)
    train(model, optimizer, range(1))


@pytest.mark.parametrize("topology", ["FSDP2 on 4", "TP x FSDP2", "DDP on 3, sharded state"])
def test_whole_tensors_of_one_process_load_into_shards(run_ranks, topology):
    model, optimizer = trained()
    args = topology, optimizer.state_dict(), state_of(model, optimizer)
    run_ranks(TOPOLOGIES[topology].world_size, load_whole, *args)


def load_another_layout():
    _, sharded = build(TOPOLOGIES["FSDP2 on 2"], seed=1)
    _, tp = build(TOPOLOGIES["TP"], seed=1)
    with pytest.raises(ValueError, match=r"uneven: momentum_buffer was saved as 2 .*torch.dist"):
        tp.load_state_dict(sharded.state_dict())
    _, plain = build(ONE, seed=1)
    with pytest.raises(ValueError, match=r"square: momentum_buffer .* a plain tensor is needed"):
        plain.load_state_dict(sharded.state_dict())


def test_shards_of_another_layout_are_refused(run_ranks):
    run_ranks(2, load_another_layout)


def load_after_sharding(directory):
    """As Accelerate does: the optimizer is built first, then its parameters are replaced."""
    model, optimizer = build(TOPOLOGIES["FSDP2 on 2"], seed=1)
    train(model, optimizer, range(2))
    save(directory, model, optimizer)

    late_model, late = build(ONE, seed=2)
    old = [*late.state]
    fully_shard(late_model, mesh=init_device_mesh("cpu", (2,)))
    named = dict(late_model.named_parameters())
    for group in late.param_groups:
        group["params"] = [named[name] for name in group["param_names"]]
    load(directory, late_model, late)
    assert not set(map(id, late.state)) & set(map(id, old))
    assert_same(state_of(late_model, late), state_of(model, optimizer))
    train(model, optimizer, range(2, 4))
    train(late_model, late, range(2, 4))
    assert_same(weights_of(late_model), weights_of(model))


def test_a_checkpoint_loads_into_parameters_replaced_after_construction(run_ranks, tmp_path):
    # R63: facts and state kept by parameter were lost with the parameter.
    run_ranks(2, load_after_sharding, tmp_path)


def step_after_sharding():
    model, optimizer = build(ONE, seed=1)
    old = [*optimizer.state]
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(RuntimeError, match="no parameter of the Muon groups has a gradient"):
        train(model, optimizer, range(1))
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [named[name] for name in group["param_names"]]
    expected_model, expected = build(TOPOLOGIES["FSDP2 on 2"], seed=1)
    for both in ((model, optimizer), (expected_model, expected)):
        train(*both, range(2))
    assert not set(map(id, optimizer.state)) & set(map(id, old))
    assert_same(weights_of(model), weights_of(expected_model))


def test_state_of_replaced_parameters_is_dropped_at_the_next_step(run_ranks):
    # R63
    run_ranks(2, step_after_sharding)


def test_state_of_a_meta_model_takes_no_memory_and_is_made_anew():
    with torch.device("meta"):
        model = nn.Linear(6, 4, bias=False)
    optimizer = dmuon.Muon(model.named_parameters())
    assert optimizer.state[model.weight]["momentum_buffer"].is_meta
    model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    optimizer.param_groups[0]["params"] = [model.weight]
    state = optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert state.device.type == "cpu"
    assert not state.any()


def test_a_checkpoint_without_a_newer_hyperparameter_loads(tmp_path):
    model, optimizer = trained()
    state_dict = get_optimizer_state_dict(model, optimizer)
    for group in state_dict["param_groups"]:
        del group["nesterov"]
    dcp.save({"optimizer": state_dict}, checkpoint_id=tmp_path)
    fresh_model, fresh = build(ONE, seed=2)
    # --8<-- [start:partial]
    state_dict = {"optimizer": get_optimizer_state_dict(fresh_model, fresh)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state_dict, checkpoint_id=tmp_path, planner=planner)
    set_optimizer_state_dict(fresh_model, fresh, state_dict["optimizer"])
    # --8<-- [end:partial]
    assert_same(state_of(fresh_model, fresh), state_of(model, optimizer))


def test_master_weights_give_what_float32_training_gives():
    torch_dtypes = {"master_weights": torch.bfloat16, "float32": torch.float32}
    runs = {}
    for name, dtype in torch_dtypes.items():
        model, optimizer = build(ONE, seed=1, dtype=dtype, master_weights=True)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.bfloat16())
        for number in range(4):
            for i, p in enumerate(model.parameters()):
                p.grad = seeded(tuple(p.shape), number, i).bfloat16().to(dtype)
            optimizer.step()
        runs[name] = model, optimizer
    model, optimizer = runs["master_weights"]
    reference = dict(runs["float32"][0].named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(optimizer.state[p]["master_weight"], reference[name])
        assert torch.equal(p, reference[name].bfloat16())


def test_a_parameter_changed_from_outside_is_taken_into_its_master_weight():
    model, optimizer = build(ONE, seed=1, dtype=torch.bfloat16, master_weights=True, lr=0.0)
    train(model, optimizer, range(1))
    loaded = Weights(5, torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(1))
    assert_same(weights_of(model), weights_of(loaded))


def test_master_weights_may_be_switched_on_and_off():
    model, before = trained(dtype=torch.bfloat16)
    fresh_model, after = build(ONE, 2, dtype=torch.bfloat16, master_weights=True)
    fresh_model.load_state_dict(model.state_dict())
    after.load_state_dict(saved(before))
    train(fresh_model, after, range(2, 3))
    state = after.state[fresh_model.square]
    assert torch.equal(state["master_weight"].bfloat16(), fresh_model.square)
    assert {value.dtype for value in state.values()} == {torch.float32}

    final_model, final = build(ONE, 3, dtype=torch.bfloat16)
    final.load_state_dict(saved(after))
    assert final.state[final_model.square].keys() == {"momentum_buffer"}
    assert final.state[final_model.square]["momentum_buffer"].dtype == torch.bfloat16
