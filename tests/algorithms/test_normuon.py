"""NorMuon against published numbers, and against a loop over matrices in float64."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import dmuon
from dmuon.layout.matrices import matrices_of
from tests.layout.test_matrices import view_of
from tests.support.parity import LR, seeded
from tests.support.reference import reference_newton_schulz

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_updates.json").read_text())
STEPS = [(3.4445, -4.7750, 2.0315)] * 5
ROWS = "second_moment_rows"


def normuon(params, **options):
    return dmuon.Muon(params, **{"lr": LR, "algorithm": "normuon", **options})


def golden_input(rows, cols, k):
    """The tensor T of the file's formula."""
    i = torch.arange(rows, dtype=torch.float64).unsqueeze(1)
    j = torch.arange(cols, dtype=torch.float64)
    return torch.sin(0.37 * (i + 1) * (j + 2) + 0.11 * i + 1.7 * k)


@pytest.mark.parametrize("shape", GOLDEN["shapes"])
def test_float64_weights_equal_the_official_code(shape):
    rows, cols = map(int, shape.split("x"))
    weight = nn.Parameter(0.1 * golden_input(rows, cols, 9))
    optimizer = normuon([weight], weight_decay=0.0, ns_dtype=torch.float64)
    for k in range(3):
        weight.grad = golden_input(rows, cols, k)
        optimizer.step()
    expected = torch.tensor(GOLDEN["shapes"][shape]["normuon"]["W3"], dtype=torch.float64)
    # The official code adds 1e-7 to norms of about 0.3 before it orthogonalizes.
    assert (weight.detach() - expected).abs().max() <= 4e-8


def reference_step_(W, G, B, v, lr=LR, weight_decay=0.1, mu=0.95, beta2=0.95):
    """One step on one matrix W (M, N), with momentum B and second moments v (M, 1)."""
    B.mul_(mu).add_((1 - mu) * G)
    ortho = reference_newton_schulz((1 - mu) * G + mu * B, STEPS)
    v.mul_(beta2).add_((1 - beta2) * (ortho * ortho).sum(1, keepdim=True) / ortho.shape[1])
    P = ortho / (v.sqrt() + 1e-10)
    scale = max(1, W.shape[0] / W.shape[1]) ** 0.5
    W.mul_(1 - lr * weight_decay).sub_(lr * scale * P * ortho.norm() / P.norm())


KINDS = {
    "square": ((6, 6), {}),
    "tall": ((9, 4), {}),
    "wide": ((4, 9), {}),
    "experts": ((3, 5, 4), {}),
    "stacked layers of experts": ((2, 3, 4, 5), {}),
    "convolution": ((6, 3, 2, 2), {"flatten": True}),
    "rows split": ((12, 5), {"split": (8, 2, 2)}),
    "columns split": ((6, 9), {"split": ((4, 3, 2), 1)}),
    "experts with columns split": ((2, 4, 6), {"split": ((4, 2), 1)}),
}


def trained(shape, options, steps=4, **muon):
    weight = nn.Parameter(seeded(shape, 1).double())
    optimizer = normuon([{"params": [weight], **options}], ns_dtype=torch.float64, **muon)
    for step in range(steps):
        weight.grad = seeded(shape, 2, step).double()
        optimizer.step()
    return weight.detach(), optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_second_moments_equal_a_loop_over_matrices(kind):
    shape, options = KINDS[kind]
    weight, optimizer = trained(shape, options)
    (group,) = optimizer.param_groups
    split = group["split"]
    expected = seeded(shape, 1).double()
    matrices = matrices_of("p", shape, flatten=group["flatten"], split=split)
    moments = []
    for block in [matrix.block for matrix in matrices]:
        W = view_of(expected, block)
        B, v = torch.zeros_like(W), W.new_zeros(len(W), 1)
        for step in range(4):
            reference_step_(W, view_of(seeded(shape, 2, step).double(), block), B, v)
        moments.append(v)
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12)
    (state,) = optimizer.state.values()
    found = state[ROWS]
    if split and split[1] == 1:
        # Blocks of columns side by side: (*batch, rows, blocks).
        num_blocks = len(split[0])
        moments = [
            torch.cat(moments[i : i + num_blocks], 1) for i in range(0, len(moments), num_blocks)
        ]
    torch.testing.assert_close(found.flatten(0, -2), torch.cat(moments), rtol=0, atol=1e-12)


def test_beta2_is_an_option_of_the_group():
    slow, _ = trained((9, 4), {"beta2": 0.999})
    usual, optimizer = trained((9, 4), {})
    assert optimizer.param_groups[0]["beta2"] == 0.95
    assert (slow - usual).abs().max() > 1e-4


def test_the_first_step_gives_all_rows_one_size_and_keeps_the_norm():
    grad = seeded((9, 4), 3).double()
    weights = [nn.Parameter(torch.zeros(9, 4, dtype=torch.float64)) for _ in range(2)]
    for weight, algorithm in zip(weights, ("normuon", "muon"), strict=True):
        weight.grad = grad.clone()
        dmuon.Muon([weight], lr=1.0, ns_dtype=torch.float64, algorithm=algorithm).step()
    rows = weights[0].detach().norm(dim=1)
    torch.testing.assert_close(rows, rows[:1].expand(9), rtol=1e-8, atol=0)
    assert weights[1].detach().norm(dim=1).std() > 0.01
    torch.testing.assert_close(weights[0].detach().norm(), weights[1].detach().norm())


def test_a_gradient_of_zeros_moves_nothing_and_gives_no_nan():
    weight = nn.Parameter(seeded((6, 4), 1))
    before = weight.detach().clone()
    optimizer = normuon([weight], weight_decay=0.0)
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert torch.equal(weight.detach(), before)
    assert not optimizer.state[weight][ROWS].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_second_moments_are_at_least_float32(dtype):
    weight = nn.Parameter(seeded((6, 4), 1).to(dtype))
    optimizer = normuon([weight])
    weight.grad = seeded((6, 4), 2).to(dtype)
    optimizer.step()
    state = optimizer.state[weight]
    assert state["momentum_buffer"].dtype == dtype
    assert state[ROWS].dtype == torch.promote_types(dtype, torch.float32)
    assert state[ROWS].shape == (6, 1)


def test_a_missing_gradient_leaves_weight_and_state_alone():
    weights = [nn.Parameter(seeded((6, 4), i)) for i in range(3)]
    optimizer = normuon(weights)
    for i, weight in enumerate(weights):
        weight.grad = seeded((6, 4), 10, i)
    optimizer.step()
    weights[1].grad = None
    values = [[w, *optimizer.state[w].values()] for w in weights]
    before = [[v.detach().clone() for v in tensors] for tensors in values]
    optimizer.step()
    changed = [
        [not torch.equal(a.detach(), b) for a, b in zip(*pair, strict=True)]
        for pair in zip(values, before, strict=True)
    ]
    assert changed == [[True] * 3, [False] * 3, [True] * 3]


def mixed(extra=()):
    """Weights by algorithm."""
    weights = {
        "muon": nn.Parameter(seeded((6, 4), 1)),
        "normuon": nn.Parameter(seeded((6, 4), 2)),
        "adamw": nn.Parameter(seeded((6, 4), 3)),
    }
    groups = [{"params": [(name, p)], "algorithm": name} for name, p in weights.items()]
    return weights, dmuon.Muon([*groups, *extra], lr=LR)


def set_grads(weights):
    for i, weight in enumerate(weights.values()):
        weight.grad = seeded((6, 4), 20, i)


def test_one_optimizer_mixes_algorithms_as_optimizers_of_their_own_would():
    weights, optimizer = mixed()
    for _ in range(2):
        set_grads(weights)
        optimizer.step()
    alone, _ = mixed()
    for name, weight in alone.items():
        single = dmuon.Muon([{"params": [weight], "algorithm": name}], lr=LR)
        set_grads(alone)
        single.step()
        single.step()
    for name, weight in weights.items():
        assert torch.equal(weight, alone[name]), name
    keys = [{*optimizer.state[weight]} for weight in weights.values()]
    adamw = {"step", "exp_avg", "exp_avg_sq"}
    assert keys == [{"momentum_buffer"}, {"momentum_buffer", ROWS}, adamw]


def test_the_report_names_the_algorithm_of_each_parameter():
    _, optimizer = mixed()
    rows = {row.parameter: row for row in optimizer.report().rows}
    assert {name: row.algorithm for name, row in rows.items()} == {
        name: name for name in ("muon", "normuon", "adamw")
    }
    assert rows["normuon"].matrices == rows["muon"].matrices == "1 of 6x4"


def test_groups_are_added_with_an_algorithm_of_their_own():
    weights, optimizer = mixed()
    weights["late"] = nn.Parameter(seeded((6, 4), 4))
    optimizer.add_param_group({"params": [("late", weights["late"])], "algorithm": "normuon"})
    set_grads(weights)
    before = weights["late"].detach().clone()
    optimizer.step()
    assert optimizer.param_groups[-1]["beta2"] == 0.95
    assert not torch.equal(weights["late"].detach(), before)
    assert optimizer.state[weights["late"]][ROWS].all()


def test_routed_matrices_take_the_algorithm_of_the_optimizer():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    optimizer = normuon(dmuon.param_groups(model))
    algorithms = {row.parameter: row.algorithm for row in optimizer.report().rows}
    assert {n for n, found in algorithms.items() if found == "normuon"} == {
        "0.weight",
        "1.weight",
    }
    assert {found for n, found in algorithms.items() if n.endswith("bias")} == {"adamw"}


@pytest.mark.parametrize("beta2", [1.0, -0.1, float("nan"), "0.9", None])
def test_beta2_out_of_range_is_refused(beta2):
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"parameter group 0: beta2 must be in \[0, 1\)"):
        normuon([{"params": [weight], "beta2": beta2}])
    optimizer = normuon([weight])
    optimizer.param_groups[0]["beta2"] = beta2
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=r"parameter group 0: beta2 must be in \[0, 1\)"):
        optimizer.step()
    assert not weight.any()


def test_an_unknown_algorithm_and_a_contradiction_are_refused():
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="parameter group 0: algorithm 'nor' is unknown; use one"):
        dmuon.Muon([{"params": [weight], "algorithm": "nor"}])
    with pytest.raises(ValueError, match="'normuon' contradicts use_muon=False"):
        dmuon.Muon([{"params": [weight], "algorithm": "normuon", "use_muon": False}])
    assert (
        dmuon.Muon([{"params": [weight], "use_muon": True}]).param_groups[0]["algorithm"] == "muon"
    )
