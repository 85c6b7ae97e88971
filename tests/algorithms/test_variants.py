"""Published variants: their formulas, and the numbers of one process on every kind of layout."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dmuon
from dmuon.algorithms import ALGORITHMS
from tests.distributed.test_checkpoint import load, save
from tests.distributed.test_resume import resume, specs_of
from tests.support.layout_cases import CASES, R, S, on
from tests.support.parity import LR, check, run_parity, seeded
from tests.support.rank_pool import RankError
from tests.support.topologies import TOPOLOGIES, assert_same, build, state_of, train, weights_of
from tests.support.variants_table import DOCS, rows

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_variants.json").read_text())
VARIANTS = [name for name in ALGORITHMS if name not in {"muon", "adamw", "normuon"}]
MATRIX_VARIANTS = [name for name in VARIANTS if ALGORITHMS[name].matrices]
AS_PUBLISHED = {
    "normuon_paper": {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
    "adamuon": {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
    "muon2": {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "ns_steps": 3},
    "mona": {},
    "musec": {"adjust_lr_fn": "none"},
    "soft_musec": {"adjust_lr_fn": "none"},
    "muonh": {"weight_decay": 0.0},
}
DECAYS = {"normuon_paper": 0.1, "adamuon": 0.1}
LAYOUTS = [
    "FSDP2, Shard(1)",
    "FSDP2, bf16 and fp32",
    "HSDP 2x2",
    "HSDP, experts",
    "DDP, sharded state",
    "DP x TP",
    "FSDP x TP, column-parallel",
    "EP, uneven experts",
    "EP x FSDP, Shard(0) twice",
    "experts, Shard(2)",
    "convolutions, inner dims",
    "fused QKV, borders inside shards",
    "heads on rows and columns",
]


def test_the_page_has_the_table_of_the_algorithms():
    lines = DOCS.read_text().splitlines()
    missing = [row for row in rows() if row not in lines]
    assert not missing, "run python -m tests.support.variants_table to renew docs/variants.md"


def table(rows, cols, k):
    """The gradients of the oracle."""
    i = torch.arange(rows, dtype=torch.float64)[:, None]
    j = torch.arange(cols, dtype=torch.float64)
    return torch.sin(0.37 * (i + 1) * (j + 2) + 0.11 * i + 1.7 * k)


def steps(name, grads, weight, **options):
    """Weights and state after steps along some gradients, in float64."""
    param = nn.Parameter(weight.clone())
    options = {"lr": LR, "weight_decay": 0.0, "ns_dtype": torch.float64, **options}
    group = {"params": [param], "algorithm": name, **options}
    optimizer = dmuon.Muon([group])
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach(), optimizer.state[param]


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
@pytest.mark.parametrize("name", [*GOLDEN["4x6"]])
def test_weights_are_those_of_the_oracle(name, shape):
    grads = [table(*shape, k) for k in range(3)]
    options = {**AS_PUBLISHED[name], "weight_decay": DECAYS.get(name, 0.0)}
    weights, _ = steps(name, grads, 0.1 * table(*shape, 9), **options)
    expected = torch.tensor(GOLDEN["x".join(map(str, shape))][name], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


def run_variants(case, names):
    """Rank body: every variant on one layout."""
    return [run_parity(case.specs, muon={**case.muon, "algorithm": name}) for name in names]


# Weights that are multiplied, and a step of their size, differ in their own last digits.
TOLERANCES = {"muonh": 5e-5, "trust_ratio": 5e-5}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_of_a_variant_is_the_same_on_every_layout(run_ranks, layout):
    (case,) = (case for case in CASES if case.name == layout)
    outcomes = run_ranks(case.world_size, run_variants, case, VARIANTS, timeout=60)
    for i, name in enumerate(VARIANTS):
        check([found[i] for found in outcomes], tolerance=TOLERANCES.get(name, 1e-5))


@pytest.mark.parametrize(
    ("mesh", "placements"), [((3,), (S(0),)), ((2, 2), (R, S(0)))], ids=["FSDP2", "HSDP"]
)
def test_variants_mix_in_one_optimizer(run_ranks, mesh, placements):
    specs = [
        replace(spec, options={"algorithm": name})
        for name in ALGORITHMS
        for spec in on(mesh, *placements)((6, 4), (5, 7))
    ]
    outcomes = run_ranks(3 if mesh == (3,) else 4, run_parity, specs)
    check(outcomes, tolerance=5e-5)


def resume_all(specs, muon, directory, names):
    for name in names:
        resume(specs, {**muon, "algorithm": name}, directory / name)


@pytest.mark.parametrize(
    ("layout", "names"),
    [("HSDP 2x2", VARIANTS), ("DDP, sharded state", ["muon2", "musec", "adamuon"])],
    ids=["HSDP", "DDP, sharded state"],
)
def test_a_resumed_run_of_a_variant_has_the_bits_of_an_uninterrupted_one(
    run_ranks, tmp_path, layout, names
):
    (case,) = (case for case in CASES if case.name == layout)
    specs = specs_of(replace(case, specs=case.specs[:2]), torch.float32)
    run_ranks(case.world_size, resume_all, specs, case.muon, tmp_path, names, timeout=120)


def train_and_save_all(topology, directory, names):
    found = {}
    for name in names:
        model, optimizer = build(TOPOLOGIES[topology], seed=1, algorithm=name)
        train(model, optimizer, range(2))
        state = state_of(model, optimizer)
        save(directory / name, model, optimizer)
        train(model, optimizer, range(2, 3))
        found[name] = state, weights_of(model)
    return found


def load_and_train_all(topology, directory, names):
    found = {}
    for name in names:
        model, optimizer = build(TOPOLOGIES[topology], seed=2, lr=7.0, algorithm=name)
        load(directory / name, model, optimizer)
        state = state_of(model, optimizer)
        train(model, optimizer, range(2, 3))
        found[name] = state, weights_of(model)
    return found


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "names"),
    [
        ("FSDP2 on 2", "FSDP2 on 3", VARIANTS),
        ("TP x FSDP2", "FSDP2 on 2", ["normuon_long_axis", "adamuon"]),
    ],
    ids=["all", "lines and elements"],
)
def test_state_of_variants_moves_between_topologies(
    run_ranks, tmp_path, saved_on, loaded_on, names
):
    source, target = TOPOLOGIES[saved_on].world_size, TOPOLOGIES[loaded_on].world_size
    saved = run_ranks(source, train_and_save_all, saved_on, tmp_path, names, timeout=120)[0]
    loaded = run_ranks(target, load_and_train_all, loaded_on, tmp_path, names, timeout=120)[0]
    for name in names:
        assert_same(loaded[name][0], saved[name][0])
        for key, weight in saved[name][1].items():
            error = (loaded[name][1][key] - weight).abs().max().item()
            assert error <= TOLERANCES.get(name, 1e-5) * LR, (name, key)


def count_collectives(names):
    """Rank body: exchanges of a step of one matrix on two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name in names:
        param = nn.Parameter(distribute_tensor(seeded((6, 4), 1), mesh, [Shard(0)]))
        param.grad = distribute_tensor(seeded((6, 4), 2), mesh, [Shard(0)])
        optimizer = dmuon.Muon([param], lr=LR, algorithm=name)
        optimizer.step()
        found[name] = optimizer.stats.num_collectives
    return found


def test_only_sums_over_matrices_take_a_collective_more(run_ranks):
    expected = {name: 3 if ALGORITHMS[name].matrices.sums else 2 for name in MATRIX_VARIANTS}
    assert expected["adamuon"] == expected["muonh"] == 3
    for found in run_ranks(2, count_collectives, MATRIX_VARIANTS):
        assert found == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_a_parameter_without_gradient_is_untouched_and_later_starts_as_new(name):
    def train(late):
        params = [nn.Parameter(seeded((6, 4), i)) for i in range(2)]
        optimizer = dmuon.Muon(params, lr=LR, algorithm=name)
        for step in range(4):
            params[0].grad = seeded((6, 4), 7, step)
            params[1].grad = None if step < late else seeded((6, 4), 8, step - late)
            before = params[1].detach().clone(), optimizer.state_dict()["state"][1]
            before = before[0], {key: value.clone() for key, value in before[1].items()}
            optimizer.step()
            if step < late:
                assert torch.equal(params[1], before[0])
                assert_same(optimizer.state[params[1]], before[1])
        return params[1], optimizer.state[params[1]]

    def shorter():
        param = nn.Parameter(seeded((6, 4), 1))
        optimizer = dmuon.Muon([param], lr=LR, algorithm=name)
        for step in range(2):
            param.grad = seeded((6, 4), 8, step)
            optimizer.step()
        return param, optimizer.state[param]

    (param, state), (expected, expected_state) = train(late=2), shorter()
    torch.testing.assert_close(param, expected, rtol=0, atol=1e-6)
    assert state.keys() == expected_state.keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_group_of_a_variant_can_be_added_between_steps(name):
    first, second = (nn.Parameter(seeded((6, 4), i)) for i in range(2))
    optimizer = dmuon.Muon([first], lr=LR)
    first.grad = seeded((6, 4), 5)
    optimizer.step()
    optimizer.add_param_group({"params": [second], "algorithm": name})
    assert optimizer.state[second].keys() == ALGORITHMS[name].state.keys()
    second.grad = seeded((6, 4), 6)
    optimizer.step()
    expected, _ = steps(
        name, [second.grad], seeded((6, 4), 1), weight_decay=0.1, ns_dtype=torch.float32
    )
    torch.testing.assert_close(second.detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_defaults_of_the_optimizer_reach_a_variant(name):
    param = nn.Parameter(seeded((6, 4), 1))
    (group,) = dmuon.Muon([param], algorithm=name).param_groups
    assert group["algorithm"] == name
    assert group["use_muon"] == (ALGORITHMS[name].matrices is not None)
    assert {key: group[key] for key in ALGORITHMS[name].options} == ALGORITHMS[name].options


@pytest.mark.parametrize(
    ("name", "option", "value", "bound"),
    [
        ("muon", "aol", 2, 2),
        ("muon2", "beta2", 1.0, 1),
        ("adamuon", "beta2", -0.1, 1),
        ("mona", "acceleration_beta", 1.0, 1),
        ("mona", "acceleration_scale", -1.0, float("inf")),
        ("musec", "max_singular", float("inf"), float("inf")),
        ("soft_musec", "soft_steps", 100, 100),
    ],
)
def test_options_out_of_range_are_refused(name, option, value, bound):
    group = {"params": [nn.Parameter(seeded((6, 4), 1))], "algorithm": name, option: value}
    with pytest.raises(ValueError, match=rf"{option} must be in \[0, {bound}\), got {value}"):
        dmuon.Muon([group])


def test_sgd_is_that_of_torch():
    grads = [table(4, 6, k) for k in range(3)]
    for nesterov in (False, True):
        found, _ = steps("sgd", grads, table(4, 6, 9), momentum=0.9, nesterov=nesterov)
        param = nn.Parameter(table(4, 6, 9))
        theirs = torch.optim.SGD([param], lr=LR, momentum=0.9, nesterov=nesterov)
        for grad in grads:
            param.grad = grad
            theirs.step()
        torch.testing.assert_close(found, param.detach(), rtol=0, atol=1e-12)


def test_signum_moves_each_element_by_lr():
    start = table(4, 6, 9)
    found, _ = steps("signum", [table(4, 6, 0)], start, nesterov=False)
    torch.testing.assert_close(found, start - LR * table(4, 6, 0).sign(), rtol=0, atol=1e-12)


def test_turbo_is_muon_of_rows_scaled_by_aol():
    start, grad = table(4, 6, 9), table(4, 6, 0)
    options = {"aol": True, "ns_coefficients": "turbo", "ns_steps": 4}
    found, _ = steps("muon", [grad], start, **options)
    update = dmuon.orthogonalize(grad, coefficients="turbo", steps=4, aol=True)
    torch.testing.assert_close(found, start - LR * update, rtol=0, atol=1e-9)


def test_deepseek_v4_has_updates_of_one_rms():
    grad = table(4, 6, 0)
    options = {"ns_coefficients": "deepseek_v4", "ns_steps": 10, "adjust_lr_fn": "deepseek_v4"}
    found, _ = steps("muon", [grad], torch.zeros(4, 6, dtype=torch.float64), **options)
    assert found.square().mean().sqrt().item() == pytest.approx(0.18 * LR, rel=1e-3)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
@pytest.mark.parametrize("name", ["normuon_paper", "adamuon"])
def test_updates_have_an_rms_of_a_fifth(name, shape):
    options = {"adjust_lr_fn": "match_rms_adamw"}
    grads, start = [table(*shape, k) for k in range(3)], table(*shape, 9)
    before, _ = steps(name, grads[:2], start, **options)
    after, _ = steps(name, grads, start, **options)
    rms = (after - before).square().mean().sqrt().item()
    assert rms == pytest.approx(0.2 * LR, rel=1e-6)


def test_adamuon_is_blind_to_the_size_of_gradients():
    grads = [table(4, 6, k) for k in range(3)]
    found, _ = steps("adamuon", grads, table(4, 6, 9))
    scaled, _ = steps("adamuon", [1024 * grad for grad in grads], table(4, 6, 9))
    assert torch.equal(found, scaled)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
def test_the_long_axis_form_equalizes_lines_along_the_longer_side(shape):
    start = torch.zeros(shape, dtype=torch.float64)
    found, state = steps("normuon_long_axis", [table(*shape, 0)], start)
    dim = 1 if shape[0] > shape[1] else 0
    sizes = found.square().mean(dim=dim).sqrt()
    torch.testing.assert_close(sizes, sizes.mean().expand_as(sizes), rtol=1e-6, atol=0)
    used, unused = ("rows", "cols") if shape[0] > shape[1] else ("cols", "rows")
    assert (state[f"second_moment_{used}"] > 0).all()
    assert (state[f"second_moment_{unused}"] == 0).all()


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
def test_muoneq_and_muon_plus_are_what_they_say_around_newton_schulz(shape):
    grad, zeros = table(*shape, 0), torch.zeros(shape, dtype=torch.float64)
    rows = grad / grad.norm(dim=-1, keepdim=True)
    scale = max(1.0, shape[0] / shape[1]) ** 0.5
    unit = min(shape) ** 0.5
    for name, matrix, is_set in [
        ("muoneq", rows, False),
        ("muon_plus", grad, True),
        ("muoneq_plus", rows, True),
    ]:
        update = dmuon.orthogonalize(matrix)
        update = update * unit / update.norm() if is_set else update
        found, _ = steps(name, [grad], zeros)
        torch.testing.assert_close(found, -LR * scale * update, rtol=0, atol=1e-9)


def test_mona_of_a_constant_gradient_is_muon():
    grads = [table(4, 6, 0)] * 3
    for name in ("mona", "mona_lite"):
        found, state = steps(name, grads, table(4, 6, 9))
        muon, _ = steps("muon", grads, table(4, 6, 9))
        atol = 1e-12 if name == "mona" else 1e-4
        torch.testing.assert_close(found, muon, rtol=0, atol=atol)
    assert state["previous_grad"].dtype == state["acceleration"].dtype == torch.bfloat16


def test_mona_averages_the_first_two_gradients_at_the_second_step():
    first, second = table(4, 6, 0), table(4, 6, 1)
    _, state = steps("mona", [first, second], table(4, 6, 9), acceleration_beta=0.9)
    expected = 0.95 * 0.05 * first + 0.05 * (first + second) / 2
    torch.testing.assert_close(state["momentum_buffer"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["musec", "soft_musec"])
def test_momentum_of_musec_keeps_its_singular_values_below_the_limit(name):
    grads = [table(6, 4, k) for k in range(3)]
    _, state = steps(name, grads, table(6, 4, 9), max_singular=0.3)
    values = torch.linalg.svdvals(state["momentum_buffer"])
    assert values.max() <= 0.3 + 1e-9
    assert values.min() >= 0.05


def test_soft_musec_saturates_singular_values():
    grad = torch.diag(torch.tensor([3.0, 0.5, 0.1], dtype=torch.float64))
    _, state = steps("soft_musec", [grad], grad, soft_steps=20)
    expected = torch.tensor([0.49319696, 0.35355339, 0.09805807], dtype=torch.float64)
    torch.testing.assert_close(state["momentum_buffer"].diagonal(), expected, rtol=0, atol=1e-7)


def test_muonh_keeps_the_norm_of_each_matrix_whatever_the_lr_scale():
    grads, start = [table(6, 4, k) for k in range(3)], 5 * table(6, 4, 9)
    found, _ = steps("muonh", grads, start)
    scaled, _ = steps("muonh", grads, start, adjust_lr_fn="match_rms_adamw")
    assert found.norm().item() == pytest.approx(start.norm().item(), rel=1e-12)
    torch.testing.assert_close(found, scaled, rtol=0, atol=1e-12)


def test_muonh_takes_the_published_step():
    grad, start = table(6, 4, 0), 5 * table(6, 4, 9)
    found, _ = steps("muonh", [grad], start)
    radius, update = start.norm(), dmuon.orthogonalize(grad)
    moved = start - LR * radius * update / update.norm()
    torch.testing.assert_close(found, radius * moved / moved.norm(), rtol=0, atol=1e-9)


def train_from_zeros(zero):
    """The last rank holds no row of either matrix."""
    mesh = init_device_mesh("cpu", (3,))
    values = [seeded((2, 4), i) * (i != zero) for i in range(2)]
    params = [nn.Parameter(distribute_tensor(v, mesh, [Shard(0)])) for v in values]
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    optimizer = dmuon.Muon(named, lr=LR, algorithm="muonh")
    for p in params:
        p.grad = distribute_tensor(seeded((2, 4), 5), mesh, [Shard(0)])
    optimizer.step()


@pytest.mark.parametrize("zero", [0, 1])
def test_muonh_refuses_weights_of_zero_on_all_ranks(run_ranks, zero):
    with pytest.raises(RankError) as caught:
        run_ranks(3, train_from_zeros, zero)
    assert str(caught.value).count(f"ValueError: p{zero}[0:2, 0:4]: its weights are all zero") == 3


def test_trust_ratio_steps_in_proportion_to_the_weights():
    grad, start = table(6, 4, 0), table(6, 4, 9)
    found, _ = steps("trust_ratio", [grad], start)
    assert (found - start).norm().item() == pytest.approx(LR * start.norm().item(), rel=1e-6)
    bounded, _ = steps("trust_ratio", [grad], start, trust_min=2.0, trust_max=2.0)
    muon, _ = steps("muon", [grad], start, lr=2 * LR)
    torch.testing.assert_close(bounded, muon, rtol=0, atol=1e-12)
    zeros = torch.zeros_like(start)
    muon, _ = steps("muon", [grad], zeros)
    assert torch.equal(steps("trust_ratio", [grad], zeros)[0], muon)


@pytest.mark.parametrize("name", MATRIX_VARIANTS)
def test_a_zero_gradient_leaves_weights_finite(name):
    start = table(6, 4, 9)
    found, _ = steps(name, [torch.zeros_like(start)] * 2, start)
    torch.testing.assert_close(found, start, rtol=1e-12, atol=0)
