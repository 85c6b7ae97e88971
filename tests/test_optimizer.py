"""The optimizer on one process: torch's and published rules as oracles; cases that broke others.

Case numbers (R03, R33, ...) are those of public reports about Muon implementations.
"""

import copy
import inspect
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dmuon
from dmuon.algorithms import ADJUST_LR_FNS

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_updates.json").read_text())
LR = 0.02


def seeded(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def parameter(*shape, seed=0, dtype=torch.float32):
    return nn.Parameter(seeded(*shape, seed=seed, dtype=dtype))


def train(optimizer, grads_by_step):
    """Take a step with each list of gradients, one for each parameter in group order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for grads in grads_by_step:
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()


def random_grads(shapes, steps=4):
    return [
        [seeded(*shape, seed=100 * step + i) for i, shape in enumerate(shapes)]
        for step in range(steps)
    ]


def change_of(optimizer, parameter, grad):
    """What one step with `grad` subtracts from a parameter."""
    before = parameter.detach().clone()
    parameter.grad = grad.clone()
    optimizer.step()
    return before - parameter.detach()


# torch.optim.Muon and AdamW as oracles

SHAPES = [(16, 16), (24, 8), (8, 24), (1, 12), (12, 1), (9, 5)]
TORCHS_MODES = [None, "original", "match_rms_adamw"]


@pytest.fixture
def torchs_newton_schulz_in_float32(monkeypatch):
    """Makes `torch.optim.Muon` iterate in float32: it calls `bfloat16()` for its working copy."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)


@pytest.mark.usefixtures("torchs_newton_schulz_in_float32")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", TORCHS_MODES)
@pytest.mark.parametrize("coefficients", [(3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)])
def test_float32_weights_equal_torch_optim_muons(nesterov, adjust_lr_fn, coefficients):
    options = {"lr": LR, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    options |= {"ns_coefficients": coefficients, "momentum": 0.9, "weight_decay": 0.3}
    ours = [parameter(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    torchs = copy.deepcopy(ours)
    train(dmuon.Muon(ours, ns_dtype=torch.float32, **options), random_grads(SHAPES))
    train(torch.optim.Muon(torchs, **options), random_grads(SHAPES))
    for our, their in zip(ours, torchs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", TORCHS_MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_updates_equal_torch_optim_muons_to_rounding(
    monkeypatch, nesterov, adjust_lr_fn, dtype
):
    # Without a copy, torch normalizes bfloat16 momentum in place (R38).
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.to(torch.bfloat16, copy=True))
    options = {"lr": 1.0, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "weight_decay": 0.0}
    shapes = [shape for shape in SHAPES if min(shape) > 1]
    ours = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    torchs = copy.deepcopy(ours)
    our_optimizer = dmuon.Muon(ours, ns_dtype=torch.bfloat16, **options)
    their_optimizer = torch.optim.Muon(torchs, **options)
    for grads in random_grads(shapes):
        with torch.no_grad():
            for p in (*ours, *torchs):
                p.zero_()
        train(our_optimizer, [[grad.to(dtype) for grad in grads]])
        train(their_optimizer, [[grad.to(dtype) for grad in grads]])
        for our, their in zip(ours, torchs, strict=True):
            # Five steps of two roundings, each to 2 ** -8 relative; 2.5 % was the most seen.
            assert (our - their).norm() <= 10 * 2**-8 * their.norm()


def test_defaults_are_torch_optim_muons_in_its_order():
    ours = list(inspect.signature(dmuon.Muon).parameters.values())
    for our, their in zip(
        ours, inspect.signature(torch.optim.Muon).parameters.values(), strict=False
    ):
        assert (our.name, our.kind, our.default) == (their.name, their.kind, their.default)
    more = ours[len(inspect.signature(torch.optim.Muon).parameters) :]
    assert {our.kind for our in more} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01), torch.tensor([0.01])])
def test_adamw_half_is_bit_equal_to_torch_optim_adamw(lr):
    shapes = [(5,), (4, 3), (2, 2, 2)]
    ours = [parameter(*shape, seed=i) for i, shape in enumerate(shapes)]
    torchs = copy.deepcopy(ours)
    options = {"lr": lr, "betas": (0.8, 0.95), "weight_decay": 0.1, "eps": 1e-7}
    train(dmuon.Muon([{"params": ours, "use_muon": False, **options}]), random_grads(shapes))
    train(torch.optim.AdamW(torchs, **options), random_grads(shapes))
    for our, their in zip(ours, torchs, strict=True):
        assert torch.equal(our, their)


def test_both_halves_in_one_optimizer_equal_two_optimizers():
    model, twin = (nn.Linear(6, 4), nn.Linear(6, 4))
    twin.load_state_dict(model.state_dict())
    both = dmuon.Muon(dmuon.param_groups(model, adamw_options={"lr": 0.003}), lr=LR)
    grads = random_grads([(4, 6), (4,)])
    train(both, grads)
    train(dmuon.Muon([twin.weight], lr=LR), [[weight] for weight, _ in grads])
    train(torch.optim.AdamW([twin.bias], lr=0.003, weight_decay=0.1), [[b] for _, b in grads])
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.bias, twin.bias)


# Published rules in float64


def golden_input(rows, cols, k):
    i = torch.arange(rows, dtype=torch.float64).unsqueeze(1)
    j = torch.arange(cols, dtype=torch.float64)
    return torch.sin(0.37 * (i + 1) * (j + 2) + 0.11 * i + 1.7 * k)


@pytest.mark.parametrize("shape", GOLDEN["shapes"])
@pytest.mark.parametrize(
    ("rule", "options", "tolerance"),
    [
        # The rule adds 1e-7 to norms of about 0.3, which moves an update of 0.02 by up to 2e-8.
        ("keller", {"weight_decay": 0.0}, 4e-8),
        # Its momentum is 20 times larger, so that 1e-7 weighs less.
        ("moonlight", {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}, 1e-9),
    ],
)
def test_float64_weights_equal_the_published_rules(shape, rule, options, tolerance):
    rows, cols = map(int, shape.split("x"))
    weight = nn.Parameter(0.1 * golden_input(rows, cols, 9))
    optimizer = dmuon.Muon([weight], lr=LR, momentum=0.95, ns_dtype=torch.float64, **options)
    train(optimizer, [[golden_input(rows, cols, k)] for k in range(3)])
    expected = torch.tensor(GOLDEN["shapes"][shape][rule]["W3"], dtype=torch.float64)
    assert (weight.detach() - expected).abs().max() <= tolerance


# Which parameters are matrices: cases R03, R04, R07, R11, R46, R49 and R51


class Holder(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for i, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, parameter(*shape, seed=i))


def rows_of(optimizer):
    return {row.parameter: row for row in optimizer.report().rows}


def test_r03_vectors_in_disguise_go_to_adamw_and_step():
    model = Holder(a=(8, 1, 1), b=(1, 8), c=(8, 1), d=(1, 1, 8), w=(4, 4))
    optimizer = dmuon.Muon(dmuon.param_groups(model))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    found = {name: row.algorithm for name, row in rows_of(optimizer).items()}
    assert found == dict.fromkeys("abcd", "adamw") | {"w": "muon"}
    assert optimizer.stats.ns_matrices == 1


@pytest.mark.parametrize("conv", [nn.Conv2d(3, 8, 3, bias=False), nn.Conv1d(4, 6, 3, bias=False)])
def test_r04_convolution_is_updated_as_its_flattened_matrix(conv):
    optimizer = dmuon.Muon(dmuon.param_groups(conv), lr=LR)
    flat = nn.Parameter(conv.weight.detach().flatten(1).clone())
    grads = random_grads([conv.weight.shape], steps=3)
    train(optimizer, grads)
    train(dmuon.Muon([flat], lr=LR), [[grad.flatten(1)] for (grad,) in grads])
    assert torch.equal(conv.weight.flatten(1), flat)
    assert optimizer.state[conv.weight]["momentum_buffer"].shape == conv.weight.shape


def test_r07_generator_of_named_parameters_fills_both_halves():
    model = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="parameters without their modules"):
        groups = dmuon.param_groups(model.named_parameters())
    optimizer = dmuon.Muon(groups)
    by_half = {group["use_muon"]: group["params"] for group in optimizer.param_groups}
    assert by_half[True] == [model.weight]
    assert by_half[False] == [model.bias]
    assert len(dmuon.Muon(nn.Linear(4, 4, bias=False).named_parameters()).param_groups) == 1


def test_r11_flat_parameter_is_refused_by_name_at_construction():
    with pytest.raises(ValueError, match=r"^flat_param: .*shape \(24,\).*FSDP2"):
        dmuon.Muon([("flat_param", nn.Parameter(torch.zeros(24)))])


def changes(param_list, groups, steps=3):
    """Train for a few steps and return what changed in each parameter."""
    before = [p.detach().clone() for p in param_list]
    shapes = [p.shape for p in param_list]
    train(dmuon.Muon(groups, lr=LR, weight_decay=0.0), random_grads(shapes, steps))
    return [b - p.detach() for b, p in zip(before, param_list, strict=True)]


def separate_changes(blocks_of, shape, steps=3):
    """The same changes when each block is a parameter of its own."""
    weight = seeded(*shape)
    blocks = [nn.Parameter(block.clone()) for block in blocks_of(weight)]
    before = [block.detach().clone() for block in blocks]
    grads = [blocks_of(grad) for (grad,) in random_grads([shape], steps)]
    train(dmuon.Muon(blocks, lr=LR, weight_decay=0.0), grads)
    return [b - block.detach() for b, block in zip(before, blocks, strict=True)]


def relative_difference(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def test_r46_fused_qkv_is_updated_as_separate_parameters():
    fused = parameter(12, 16)
    (found,) = changes([fused], [{"params": [fused], "split": (8, 2, 2)}])
    expected = separate_changes(lambda t: t.split([8, 2, 2]), (12, 16))
    for block, separate in zip(found.split([8, 2, 2]), expected, strict=True):
        torch.testing.assert_close(block, separate, rtol=0, atol=1e-5 * LR)
    whole = parameter(12, 16)
    (coupled,) = changes([whole], [whole])
    assert relative_difference(coupled, found) > 0.2


def test_r49_heads_are_split_on_the_axis_that_holds_them_and_nothing_else_is():
    model = Holder(q_proj=(8, 8), o_proj=(8, 8), dense_4h_to_h=(32, 8))
    split = {"q_proj": dmuon.Split.equal(4), "o_proj": dmuon.Split.equal(4, dim=1)}
    optimizer = dmuon.Muon(dmuon.param_groups(model, split=split), lr=LR, weight_decay=0.0)
    matrices = {name: row.matrices for name, row in rows_of(optimizer).items()}
    assert matrices == {"q_proj": "4 of 2x8", "o_proj": "4 of 8x2", "dense_4h_to_h": "1 of 32x8"}
    before = model.o_proj.detach().clone()
    (grads,) = random_grads([(8, 8)] * 2 + [(32, 8)], steps=1)
    for p, grad in zip((model.o_proj, model.q_proj, model.dense_4h_to_h), grads, strict=True):
        p.grad = grad
    optimizer.step()
    heads = [nn.Parameter(head.clone()) for head in before.split(2, dim=1)]
    train(dmuon.Muon(heads, lr=LR, weight_decay=0.0), [grads[0].split(2, dim=1)])
    torch.testing.assert_close(model.o_proj.detach(), torch.cat(heads, 1), rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match=r"q_proj: cannot split shape \(8, 8\) into 3 equal"):
        dmuon.Muon(dmuon.param_groups(model, split={"q_proj": dmuon.Split.equal(3)}))


@pytest.mark.parametrize("shape", [(4, 6, 8), (2, 3, 4, 5), (6, 6, 6)])
def test_r51_stack_of_experts_is_updated_as_separate_parameters(shape):
    # As many stacks as experts: a broadcast over the wrong axis would go unnoticed.
    stacks = [parameter(*shape, seed=i) for i in range(shape[0])]
    experts = [nn.Parameter(m.clone()) for s in stacks for m in s.detach().flatten(0, -3)]
    grads = [seeded(*shape, seed=10 + i) for i in range(len(stacks))]
    for grad in grads:
        grad[0] *= 1e4
        grad[1] = 0.0
    optimizer = dmuon.Muon(stacks, lr=LR)
    train(optimizer, [grads] * 2)
    train(dmuon.Muon(experts, lr=LR), [[m for g in grads for m in g.flatten(0, -3)]] * 2)
    found = torch.cat([stack.detach().flatten(0, -3) for stack in stacks])
    torch.testing.assert_close(found, torch.stack(experts).detach(), rtol=0, atol=1e-5 * LR)
    assert optimizer.stats.ns_matrices == len(experts)


# One process: case R31


def test_r31_steps_without_a_process_group_and_equally_as_a_group_of_one_rank(fake_world):
    def weights(lay_out, **options):
        params = [nn.Parameter(lay_out(seeded(*shape))) for shape in SHAPES]
        optimizer = dmuon.Muon(params, lr=LR, **options)
        for step in range(3):
            for p, shape in zip(params, SHAPES, strict=True):
                p.grad = lay_out(seeded(*shape, seed=step))
            optimizer.step()
        assert optimizer.stats.ns_matrices == len(SHAPES)
        assert (optimizer.stats.bytes_sent, optimizer.stats.num_collectives) == (0, 0)
        return [p.to_local() if isinstance(p, DTensor) else p for p in params]

    assert not dist.is_initialized()
    alone = weights(torch.clone)
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,))
        group = dist.group.WORLD
        one_rank = [
            weights(torch.clone, process_group=group),
            weights(torch.clone, process_group=group, shard_state=True),
            weights(lambda t: DTensor.from_local(t, mesh, [Shard(0)])),
            weights(lambda t: DTensor.from_local(t, mesh, [Replicate()])),
        ]
    for found in one_rank:
        assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


# Numbers: cases R33, R34, R38, R41 and R44


@pytest.mark.parametrize("norm", [1e-6, 1e-9, 1e-12, 1e-20, 1e18, 1e20])
def test_r33_update_does_not_depend_on_the_scale_of_the_gradient(norm):
    grad = seeded(32, 16)
    grad /= grad.norm()

    def update(scale):
        weight = nn.Parameter(torch.zeros(32, 16))
        return change_of(dmuon.Muon([weight], lr=1.0), weight, grad * scale)

    expected = update(1.0)
    assert expected.norm() > 4
    torch.testing.assert_close(update(norm), expected, rtol=0, atol=1e-4)


def test_r34_zero_gradient_gives_zero_update_also_beside_others():
    stack = nn.Parameter(torch.zeros(2, 4, 4))
    grad = torch.stack([torch.zeros(4, 4), seeded(4, 4)])
    update = change_of(dmuon.Muon([stack], lr=1.0), stack, grad)
    alone = nn.Parameter(torch.zeros(4, 4))
    assert torch.equal(update[0], torch.zeros(4, 4))
    expected = change_of(dmuon.Muon([alone], lr=1.0), alone, grad[1])
    torch.testing.assert_close(update[1], expected, rtol=0, atol=1e-6)


def test_r34_building_a_checkpoint_template_changes_no_weight():
    model = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    optimizer = dmuon.Muon(dmuon.param_groups(model))
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(state["weight"]["momentum_buffer"], torch.zeros(4, 4))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r38_newton_schulz_writes_neither_momentum_nor_gradient(nesterov, dtype):
    weight = nn.Parameter(torch.ones(8, 5, dtype=dtype))
    options = {"momentum": 0.9, "nesterov": nesterov, "ns_dtype": dtype}
    optimizer = dmuon.Muon([weight], lr=0.0, **options)
    weight.grad = torch.ones(8, 5, dtype=dtype)
    optimizer.step()
    assert torch.equal(weight.grad, torch.ones(8, 5, dtype=dtype))
    assert torch.equal(weight, torch.ones(8, 5, dtype=dtype))
    expected = torch.zeros(8, 5, dtype=dtype).lerp(torch.ones(8, 5, dtype=dtype), 1 - 0.9)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], expected)


@pytest.mark.parametrize(
    ("adjust_lr_fn", "ratio"),
    [
        ("original", 3**0.5),
        ("match_rms_adamw", 1.0),
        ("spectral", 1.0),
        ("spectral_unclamped", 3.0),
        (lambda shape: float(shape[0]), 3.0),
    ],
)
def test_r41_scale_reads_rows_and_cols_of_the_weight(adjust_lr_fn, ratio):
    grad = seeded(12, 4)

    def norm(grad):
        weight = nn.Parameter(torch.zeros(grad.shape))
        optimizer = dmuon.Muon([weight], lr=LR, adjust_lr_fn=adjust_lr_fn)
        return change_of(optimizer, weight, grad).norm().item()

    assert norm(grad) / norm(grad.T) == pytest.approx(ratio, rel=1e-5)


def test_every_named_scale_is_usable():
    for name in ADJUST_LR_FNS:
        weight = nn.Parameter(torch.zeros(4, 4))
        optimizer = dmuon.Muon([weight], lr=LR, adjust_lr_fn=name)
        assert change_of(optimizer, weight, seeded(4, 4)).norm() > 0


@pytest.mark.parametrize("nesterov", [True, False])
def test_r44_second_update_uses_the_momentum_of_the_first(nesterov):
    grads = [seeded(6, 4, seed=1), seeded(6, 4, seed=2)]

    def last_update(grads):
        weight = nn.Parameter(torch.zeros(6, 4))
        optimizer = dmuon.Muon([weight], lr=1.0, nesterov=nesterov, weight_decay=0.0)
        return [change_of(optimizer, weight, grad) for grad in grads][-1]

    assert relative_difference(last_update(grads), last_update(grads[1:])) > 0.1


# An ordinary torch optimizer: cases R55 and R75, closures, missing gradients


@pytest.mark.parametrize(
    "method", ["step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"]
)
def test_r55_overrides_keep_the_parameters_of_torchs_optimizer(method):
    def names_and_kinds(cls):
        parameters = inspect.signature(getattr(cls, method)).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert names_and_kinds(dmuon.Muon) == names_and_kinds(torch.optim.Optimizer)


def test_r55_state_dict_can_be_loaded_by_keyword_and_goes_on_bit_equal():
    weight = parameter(4, 4)
    optimizer = dmuon.Muon([("w", weight)], lr=LR)
    train(optimizer, random_grads([(4, 4)], steps=2))
    twin = nn.Parameter(weight.detach().clone())
    other = dmuon.Muon([("w", twin)], lr=1.0)
    other.load_state_dict(state_dict=copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, other):
        train(each, random_grads([(4, 4)], steps=1))
    assert torch.equal(weight, twin)


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (lambda: dmuon.Muon([("b", parameter(4))]), r"^b: .*dmuon\.param_groups"),
        (lambda: dmuon.Muon([parameter(4)]), r"^param_groups\[0\]\['params'\]\[0\]: "),
        (lambda: dmuon.Muon([parameter(4, 4)], shard_state=True), "needs the process_group"),
        (lambda: dmuon.Muon([parameter(4, 4)], bucket_cap_mb=0), "bucket_cap_mb must be > 0"),
    ],
)
def test_r75_errors_say_what_was_found_and_what_to_change(build, remedy):
    with pytest.raises(ValueError, match=remedy):
        build()


def test_step_calls_the_closure_with_gradients_and_returns_its_loss():
    weight = parameter(4, 4)
    optimizer = dmuon.Muon([weight], lr=LR)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_parameter_without_gradient_is_left_untouched():
    idle, busy, bias = parameter(4, 4, seed=1), parameter(4, 4, seed=2), parameter(4, seed=3)
    groups = [{"params": [idle, busy]}, {"params": [bias], "use_muon": False}]
    optimizer = dmuon.Muon(groups, lr=LR)
    train(optimizer, random_grads([(4, 4), (4, 4), (4,)], steps=1))
    before = copy.deepcopy((idle, bias, optimizer.state[idle], optimizer.state[bias]))
    train(optimizer, [[None, seeded(4, 4), None]])
    assert optimizer.stats.ns_matrices == 1
    assert torch.equal(idle, before[0])
    assert torch.equal(bias, before[1])
    for state, old in ((optimizer.state[idle], before[2]), (optimizer.state[bias], before[3])):
        assert all(torch.equal(state[key], old[key]) for key in old)


def test_parameter_frozen_after_a_step_is_left_untouched():
    frozen, trained = parameter(4, 4, seed=1), parameter(4, 4, seed=2)
    optimizer = dmuon.Muon([frozen, trained], lr=LR)
    train(optimizer, random_grads([(4, 4)] * 2, steps=1))
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    train(optimizer, random_grads([(4, 4)] * 2, steps=2))
    assert torch.equal(frozen, before)


def test_step_without_any_gradient_is_an_error_that_names_a_parameter():
    optimizer = dmuon.Muon([("layers.0.weight", parameter(4, 4))])
    with pytest.raises(RuntimeError, match=r"^layers\.0\.weight: .*backward"):
        optimizer.step()


def test_lr_and_weight_decay_are_read_afresh_every_step():
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = dmuon.Muon([weight], lr=LR, weight_decay=0.0)
    grad = seeded(4, 4)
    first = change_of(optimizer, weight, grad)
    optimizer.param_groups[0]["lr"] = LR / 2
    second = change_of(optimizer, weight, grad)
    torch.testing.assert_close(second, first / 2, rtol=0, atol=1e-7)
    optimizer.param_groups[0].update(lr=0.5, weight_decay=2.0)
    before = weight.detach().clone()
    update = change_of(optimizer, weight, grad)
    torch.testing.assert_close(update - before, first * 0.5 / LR, rtol=0, atol=1e-5)


def test_group_added_later_is_trained_with_its_own_options():
    first, later = parameter(4, 4, seed=1), parameter(6, 4, seed=2)
    optimizer = dmuon.Muon([first], lr=LR)
    train(optimizer, random_grads([(4, 4)], steps=1))
    optimizer.add_param_group({"params": [later], "lr": 0.5, "weight_decay": 0.0})
    before = later.detach().clone()
    train(optimizer, random_grads([(4, 4), (6, 4)], steps=1))
    assert optimizer.stats.ns_matrices == 2
    twin = nn.Parameter(before.clone())
    train(dmuon.Muon([twin], lr=0.5, weight_decay=0.0), [[random_grads([(4, 4), (6, 4)])[0][1]]])
    assert torch.equal(later, twin)


def test_buckets_change_nothing_but_the_scratch_memory():
    def weights(cap):
        params = [parameter(*shape, seed=i) for i, shape in enumerate(SHAPES)]
        train(dmuon.Muon(params, lr=LR, bucket_cap_mb=cap), random_grads(SHAPES))
        return params

    for whole, cut in zip(weights(64), weights(1e-6), strict=True):
        torch.testing.assert_close(whole, cut, rtol=0, atol=1e-6)


def test_two_models_whose_parameters_share_names_are_refused():
    # Both were known by one name, and the first was silently left out of every step.
    models = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match="weight: two parameters have this name"):
        dmuon.Muon([{"params": model.named_parameters()} for model in models])
