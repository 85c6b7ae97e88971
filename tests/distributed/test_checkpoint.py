"""Checkpoints through torch.distributed.checkpoint: any topology to any other."""

import inspect
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import dmuon
from tests.support.parity import LR
from tests.support.topologies import (
    TOPOLOGIES,
    assert_same,
    build,
    state_of,
    train,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)

PAIRS = [
    ("FSDP2 on 4", "FSDP2 on 2"),
    ("FSDP2 on 4", "FSDP2 on 3"),
    ("FSDP2 on 4", "FSDP2 on 1"),
    # R58: converters knew `exp_avg` only, and files were named by rank.
    ("FSDP2 on 2", "FSDP2 on 1"),
    ("FSDP2 on 2", "FSDP2 on 3"),
    ("FSDP2 on 2", "FSDP2 on 4"),
    ("FSDP2 on 3", "HSDP"),
    ("HSDP", "TP x FSDP2"),
    ("TP x FSDP2", "DDP on 2"),
    ("DDP on 2", "one process"),
    ("one process", "FSDP2 on 4"),
    ("TP", "FSDP2 on 4"),
    ("FSDP2 on 2", "TP"),
    ("TP x FSDP2", "TP"),
    ("EP", "EP x FSDP2"),
    ("EP x FSDP2", "one process"),
    ("DDP on 4, sharded state", "FSDP2 on 3"),
    ("FSDP2 on 2", "DDP on 3, sharded state"),
    ("DDP on 3, sharded state", "DDP on 4, sharded state"),
    ("DDP on 2", "DDP on 4, sharded state"),
]


# --8<-- [start:save]
def save(directory, model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)


# --8<-- [end:save]
# --8<-- [start:load]
def load(directory, model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


# --8<-- [end:load]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_flat(directory, model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)


def load_flat(directory, model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=FLAT,
    )


FORMATS = {"nested": (save, load), "flat": (save_flat, load_flat)}


def train_and_save(topology, directory, style, algorithm):
    model, optimizer = build(TOPOLOGIES[topology], seed=1, algorithm=algorithm)
    train(model, optimizer, range(3))
    saved_state = state_of(model, optimizer)
    FORMATS[style][0](directory, model, optimizer)
    train(model, optimizer, range(3, 4))
    return saved_state, weights_of(model)


def load_and_train(topology, directory, style, algorithm):
    # Another seed and learning rate: what the checkpoint lacks would show.
    model, optimizer = build(TOPOLOGIES[topology], seed=2, lr=7.0, algorithm=algorithm)
    FORMATS[style][1](directory, model, optimizer)
    loaded_state = state_of(model, optimizer)
    train(model, optimizer, range(3, 4))
    return loaded_state, weights_of(model)


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "style"),
    [(*pair, "nested") for pair in PAIRS] + [(*pair, "flat") for pair in PAIRS[::3]],
)
def test_state_moves_between_topologies(run_ranks, tmp_path, saved_on, loaded_on, style):
    move_state(run_ranks, tmp_path, (saved_on, loaded_on), style, "muon")


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "style"),
    [(*pair, "nested") for pair in PAIRS] + [(*pair, "flat") for pair in PAIRS[1::3]],
)
def test_rows_of_normuon_move_between_topologies(run_ranks, tmp_path, saved_on, loaded_on, style):
    move_state(run_ranks, tmp_path, (saved_on, loaded_on), style, "normuon")


def move_state(run_ranks, directory, topologies, style, algorithm):
    source, target = (TOPOLOGIES[name] for name in topologies)
    options = directory, style, algorithm
    saved = run_ranks(source.world_size, train_and_save, topologies[0], *options)
    loaded = run_ranks(target.world_size, load_and_train, topologies[1], *options)
    state, weights = saved[0]
    rows = {name for name in state if name.endswith("second_moment_rows")}
    assert len(rows) == (5 if algorithm == "normuon" else 0)
    assert all(state[name].all() for name in rows)
    for loaded_state, loaded_weights in loaded:
        assert_same(loaded_state, state)
        for name, expected in weights.items():
            error = (loaded_weights[name] - expected).abs().max().item()
            assert error <= 1e-5 * LR, (name, error)


def describe_state(topology):
    model, optimizer = build(TOPOLOGIES[topology], seed=1)
    names = {p: name for name, p in model.named_parameters()}
    return {
        (names[p], key): (tuple(value.shape), value.dtype)
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }


@pytest.mark.parametrize("topology", [n for n, t in TOPOLOGIES.items() if t.world_size > 1])
def test_state_is_complete_and_the_same_on_all_ranks_from_construction(run_ranks, topology):
    # R52: owner-only state broke DCP's flattening, and full state dicts kept one rank's alone.
    first, *others = run_ranks(TOPOLOGIES[topology].world_size, describe_state, topology)
    assert all(other == first for other in others)
    assert {key for name, key in first if name == "bias"} == {"step", "exp_avg", "exp_avg_sq"}
    assert {key for name, key in first if name != "bias"} == {"momentum_buffer"}
    assert first["experts", "momentum_buffer"] == ((3, 4, 6), torch.float32)


def save_dtype(topology, directory, dtype):
    model, optimizer = build(TOPOLOGIES[topology], seed=1, dtype=dtype)
    train(model, optimizer, range(2))
    save(directory, model, optimizer)
    return state_of(model, optimizer)


def load_dtype(topology, directory, dtype, saved):
    model, optimizer = build(TOPOLOGIES[topology], seed=2, dtype=dtype)
    load(directory, model, optimizer)
    expected = {n: t if n.endswith("step") else t.to(dtype) for n, t in saved.items()}
    assert_same(state_of(model, optimizer), expected)
    train(model, optimizer, range(2, 4))
    assert all(weight.isfinite().all() for weight in weights_of(model).values())


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        ("FSDP2 on 3", "FSDP2 on 2"),
        ("EP x FSDP2", "TP x FSDP2"),
        ("HSDP", "DDP on 4, sharded state"),
    ],
)
def test_momentum_is_converted_to_the_dtype_of_its_parameter(
    run_ranks, tmp_path, saved_on, loaded_on, dtypes
):
    # R39
    source, target = TOPOLOGIES[saved_on], TOPOLOGIES[loaded_on]
    saved = run_ranks(source.world_size, save_dtype, saved_on, tmp_path, dtypes[0])
    run_ranks(target.world_size, load_dtype, loaded_on, tmp_path, dtypes[1], saved[0])


def twice_the_rows(shape):
    return 2.0 * shape[0]


# What a full state dict refuses: a dtype, and a function.
AWKWARD = {"ns_dtype": torch.float32, "adjust_lr_fn": twice_the_rows}


def save_full(topology, options):
    """Return a fresh optimizer with its model, the file of a trained one on rank 0, its state."""
    model, optimizer = build(TOPOLOGIES[topology], seed=1, **AWKWARD)
    train(model, optimizer, range(3))
    full = get_optimizer_state_dict(
        model,
        optimizer,
        options=StateDictOptions(full_state_dict=True, cpu_offload=True, **options),
    )
    assert bool(full) == (dist.get_rank() == 0)
    stream = io.BytesIO()
    torch.save(full, stream)
    stream.seek(0)
    return build(TOPOLOGIES[topology], seed=2, **AWKWARD), stream, state_of(model, optimizer)


def check_full(model, optimizer, expected):
    assert_same(state_of(model, optimizer), expected)
    assert optimizer.param_groups[0]["ns_dtype"] is torch.float32
    assert optimizer.param_groups[0]["adjust_lr_fn"] is twice_the_rows
    train(model, optimizer, range(1))


def load_full_from_rank_0(topology):
    (model, optimizer), file, expected = save_full(topology, {})
    # --8<-- [start:full]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full = torch.load(file) if dist.get_rank() == 0 else {}
    set_optimizer_state_dict(model, optimizer, full, options=options)
    # --8<-- [end:full]
    check_full(model, optimizer, expected)


def load_full_on_every_rank(topology):
    """Torch's own `full_state_dict=True` cannot load a flattened one, into any optimizer."""
    (model, optimizer), file, expected = save_full(topology, {"flatten_optimizer_state_dict": True})
    file = [file.getvalue()]
    dist.broadcast_object_list(file)
    set_optimizer_state_dict(model, optimizer, torch.load(io.BytesIO(file[0])), options=FLAT)
    check_full(model, optimizer, expected)


@pytest.mark.parametrize("body", [load_full_from_rank_0, load_full_on_every_rank])
@pytest.mark.parametrize(
    "topology", ["FSDP2 on 4", "HSDP", "TP x FSDP2", "EP x FSDP2", "DDP on 3, sharded state"]
)
def test_a_full_state_dict_holds_all_momentum_and_loads(run_ranks, topology, body):
    run_ranks(TOPOLOGIES[topology].world_size, body, topology)


def async_save_then_train(directory):
    model, optimizer = build(TOPOLOGIES["FSDP2 on 2"], seed=1)
    train(model, optimizer, range(3))
    expected = state_of(model, optimizer)
    # --8<-- [start:async]
    group = dist.new_group(backend="gloo")  # once, before training
    model_state, optimizer_state = get_state_dict(model, optimizer)
    saving = dcp.async_save(
        {"model": model_state, "optimizer": optimizer_state},
        checkpoint_id=directory,
        process_group=group,
    )
    train(model, optimizer, range(3, 5))
    saving.result()
    # --8<-- [end:async]
    fresh_model, fresh = build(TOPOLOGIES["FSDP2 on 2"], seed=2)
    load(directory, fresh_model, fresh)
    assert_same(state_of(fresh_model, fresh), expected)


def test_training_goes_on_during_an_async_save(run_ranks, tmp_path):
    run_ranks(2, async_save_then_train, tmp_path)


def load_template(topology):
    model, optimizer = build(TOPOLOGIES[topology], seed=1)
    before = weights_of(model)
    optimizer.state.clear()
    state_dict = get_optimizer_state_dict(model, optimizer)
    assert_same(weights_of(model), before)
    for name, state in state_dict["state"].items():
        for key, value in state.items():
            if key != "step":
                assert not whole_tensor(value).any(), (name, key)


def whole_tensor(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("topology", ["one process", "FSDP2 on 2", "HSDP", "DDP on 2"])
def test_the_step_by_which_dcp_makes_a_template_changes_nothing(run_ranks, topology):
    # R34: with lr 0 and zero gradients, a normalizer without a guard turned the weights NaN.
    run_ranks(TOPOLOGIES[topology].world_size, load_template, topology)


def template_steps():
    model, optimizer = build(TOPOLOGIES["FSDP2 on 2"], seed=1)
    get_optimizer_state_dict(model, optimizer)
    return optimizer.stats.ns_matrices


def test_making_a_template_takes_no_step(run_ranks):
    assert run_ranks(2, template_steps) == [0, 0]


class Linears(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 4)


def shard(model):
    for module in [*model.children(), model]:
        torch.distributed.fsdp.fully_shard(module)
    return model


def round_trip(directory, style, grouped):
    """Save, load into a fresh model and optimizer, and step both."""
    runs = []
    for seed in (1, 2):
        model = shard(Linears(seed))
        runs.append((model, dmuon.Muon(grouped(model), lr=LR / seed)))
    (model, optimizer), (fresh_model, fresh) = runs
    train(model, optimizer, range(2))
    FORMATS[style][0](directory, model, optimizer)
    FORMATS[style][1](directory, fresh_model, fresh)
    assert_same(state_of(fresh_model, fresh), state_of(model, optimizer))
    for group, expected in zip(fresh.param_groups, optimizer.param_groups, strict=True):
        assert {**group, "params": ()} == {**expected, "params": ()}
    train(model, optimizer, range(2, 4))
    train(fresh_model, fresh, range(2, 4))
    assert_same(weights_of(fresh_model), weights_of(model))


def with_empty_groups(model):
    return [
        {"params": [model.linear.weight], "lr": 0.03},
        {"params": [], "lr": 0.5},
        {"params": [model.linear.bias], "use_muon": False, "lr": 0.01},
        {"params": []},
    ]


def load_with_empty_groups(directory, style):
    """What DCP says of empty groups, of torch's AdamW and of `Muon`."""
    found = []
    for number, make in enumerate((torch.optim.AdamW, dmuon.Muon)):
        model = shard(Linears(1))
        groups = with_empty_groups(model)
        if make is torch.optim.AdamW:
            groups = [{k: v for k, v in group.items() if k != "use_muon"} for group in groups]
        optimizer = make(groups, lr=LR)
        try:
            FORMATS[style][0](directory / str(number), model, optimizer)
            FORMATS[style][1](directory / str(number), model, optimizer)
        except (IndexError, KeyError, ValueError) as error:
            found.append(type(error).__name__)
    other = shard(Linears(2))
    fresh = dmuon.Muon(with_empty_groups(other), lr=LR / 2)
    fresh.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in fresh.param_groups] == [0.03, 0.5, 0.01, LR]
    return found


@pytest.mark.parametrize("style", FORMATS)
def test_groups_without_parameters_are_kept_and_dcp_says_what_it_says_of_adamw(
    run_ranks, tmp_path, style
):
    # R54: DCP cannot describe an empty group. Optimizers that wrap others count on it all the same.
    for adamw, muon in run_ranks(2, load_with_empty_groups, tmp_path, style):
        assert adamw == muon


def mixed_groups(model):
    options = {"ns_coefficients": [(3.4445, -4.775, 2.0315)] * 3, "ns_dtype": torch.float32}
    return dmuon.param_groups(model, muon_options=options, adamw_options={"betas": (0.8, 0.9)})


@pytest.mark.parametrize("style", FORMATS)
def test_muon_and_adamw_groups_survive_a_round_trip(run_ranks, tmp_path, style):
    # R56: a bundle of two optimizers is no optimizer, and has no `state`.
    run_ranks(2, round_trip, tmp_path, style, mixed_groups)


@pytest.mark.parametrize(
    "method", ["step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"]
)
def test_methods_keep_the_signatures_of_the_base(method):
    # R55: DCP calls `load_state_dict(state_dict=...)` by keyword.
    ours, base = (
        [(p.name, p.kind) for p in inspect.signature(getattr(cls, method)).parameters.values()]
        for cls in (dmuon.Muon, torch.optim.Optimizer)
    )
    assert ours == base


def regroup(merge):
    """Load into an optimizer that splits one of two weights, and so has one group more or less."""
    models = [shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8))) for _ in range(2)]
    splits = [{"0": (4, 2)}, {}] if merge else [{}, {"0": (4, 2)}]
    optimizer, fresh = (
        dmuon.Muon(dmuon.param_groups(model, split=split), lr=lr)
        for model, split, lr in zip(models, splits, (0.01, 7.0), strict=True)
    )
    train(models[0], optimizer, range(2))
    return *models, optimizer, fresh


def regroup_through_files(directory, style, merge):
    model, fresh_model, optimizer, fresh = regroup(merge)
    FORMATS[style][0](directory, model, optimizer)
    FORMATS[style][1](directory, fresh_model, fresh)
    assert_same(state_of(fresh_model, fresh), state_of(model, optimizer))
    train(fresh_model, fresh, range(1))
    return [(group["param_names"], group["split"], group["lr"]) for group in fresh.param_groups]


MERGED = [(["0.weight", "1.weight"], None, 0.01), (["0.bias", "1.bias"], None, 0.01)]
DIVIDED = [(["0.weight"], ((4, 2), 0), 0.01), (["1.weight"], None, 0.01), MERGED[1]]


@pytest.mark.parametrize(("merge", "expected"), [(False, DIVIDED), (True, MERGED)])
def test_parameters_may_be_split_and_grouped_anew(run_ranks, tmp_path, merge, expected):
    groups = run_ranks(2, regroup_through_files, tmp_path, "flat", merge)[0]
    assert sorted(groups) == sorted(expected)


def regroup_in_memory():
    model, fresh_model, optimizer, fresh = regroup(merge=False)
    state_dict = get_optimizer_state_dict(model, optimizer)
    with pytest.warns(UserWarning, match="parameter group 0: the state dict has no hyperparam"):
        set_optimizer_state_dict(fresh_model, fresh, state_dict)
    assert_same(state_of(fresh_model, fresh), state_of(model, optimizer))
    train(fresh_model, fresh, range(1))
    return [group["lr"] for group in fresh.param_groups]


def test_hyperparameters_that_torch_loses_are_kept_and_said(run_ranks):
    # Values of the nested form belong to groups; torch gives those of a divided one to one half.
    assert run_ranks(2, regroup_in_memory)[0] == [7.0, 0.01, 0.01]


def save_experts(directory):
    model, optimizer = expert_model(dist.get_world_size())
    whole_experts = torch.arange(64.0).reshape(4, 4, 4)
    place(model.experts, whole_experts)
    place(optimizer.state[model.experts]["momentum_buffer"], -whole_experts)
    save(directory, model, optimizer)


def load_experts(directory):
    model, optimizer = expert_model(dist.get_world_size())
    load(directory, model, optimizer)
    return weights_of(model) | state_of(model, optimizer)


def expert_model(world_size):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,))
    model = nn.Module()
    experts = torch.distributed.tensor.zeros(
        4, 4, 4, device_mesh=mesh, placements=[torch.distributed.tensor.Shard(0)]
    )
    model.register_parameter("experts", nn.Parameter(experts))
    return model, dmuon.Muon(model.named_parameters())


def place(tensor, values):
    mine = torch.distributed.tensor.distribute_tensor(
        values, tensor.device_mesh, tensor.placements, src_data_rank=None
    )
    with torch.no_grad():
        tensor.copy_(mine)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_experts_keep_their_identity(run_ranks, tmp_path, world_size):
    # R59: each rank wrote experts under the same local names, and one rank's survived.
    run_ranks(2, save_experts, tmp_path)
    expected = torch.arange(64.0).reshape(4, 4, 4)
    for loaded in run_ranks(world_size, load_experts, tmp_path):
        assert_same(loaded, {"experts": expected, "experts.momentum_buffer": -expected})
