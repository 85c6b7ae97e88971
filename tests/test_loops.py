"""The optimizer in ordinary training loops of one process: schedulers, closures, hooks, copies."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import dmuon

MUON_LR, ADAMW_LR = 2e-2, 1e-5


def tiny_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def optimizer_of(model, *, muon_lr=MUON_LR, adamw_lr=ADAMW_LR, **options):
    named = [*model.named_parameters()]
    groups = [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "lr": muon_lr},
        {"params": [(n, p) for n, p in named if p.ndim == 1], "algorithm": "adamw", "lr": adamw_lr},
    ]
    return dmuon.Muon(groups, **options)


def set_grads(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def train(model, optimizer, steps):
    for step in steps:
        set_grads(model, step)
        optimizer.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def lrs(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


# Schedulers


def test_r61_lambda_lr_keeps_the_ratio_of_two_learning_rates():
    optimizer = optimizer_of(tiny_model())
    LambdaLR(optimizer, lambda _: 0.5)
    assert lrs(optimizer) == [1e-2, 5e-6]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: LambdaLR(o, lambda t: min(1.0, t / 4)),
        lambda o: CosineAnnealingLR(o, T_max=6),
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=3), CosineAnnealingLR(o, 5)], [3]),
    ],
    ids=["warm-up from 0", "cosine", "warm-up, then cosine"],
)
def test_a_scheduler_moves_both_learning_rates_in_proportion(make):
    model = tiny_model()
    optimizer = optimizer_of(model)
    scheduler = make(optimizer)
    seen = []
    for step in range(6):
        train(model, optimizer, [step])
        seen.append(lrs(optimizer))
        scheduler.step()
    assert len({lr for lr, _ in seen}) > 3
    for muon, adamw in seen:
        assert adamw == pytest.approx(muon * ADAMW_LR / MUON_LR, rel=1e-12)


def test_each_step_uses_the_learning_rate_of_its_moment():
    model = tiny_model()
    optimizer = optimizer_of(model, weight_decay=0.0)
    scheduler = LambdaLR(optimizer, lambda t: [1.0, 0.0, 0.5][t])
    moved = []
    for _ in range(2):
        before = weights(model)
        train(model, optimizer, [0])
        moved.append([not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)])
        scheduler.step()
    assert moved == [[True] * 4, [False] * 4]
    assert lrs(optimizer) == [MUON_LR / 2, ADAMW_LR / 2]


@pytest.mark.parametrize("cycle_momentum", [True, False])
def test_r62_one_cycle_runs_on_a_mixed_optimizer(cycle_momentum):
    model = tiny_model()
    optimizer = optimizer_of(model)
    scheduler = OneCycleLR(
        optimizer, max_lr=[MUON_LR, ADAMW_LR], total_steps=10, cycle_momentum=cycle_momentum
    )
    muon, adamw = optimizer.param_groups
    seen = []
    for step in range(10):
        train(model, optimizer, [step])
        seen.append((muon["lr"], muon["momentum"], adamw["lr"], adamw["betas"][0]))
        if step < 9:
            scheduler.step()
    for lr, _, adamw_lr, _ in seen:
        assert adamw_lr == pytest.approx(lr * ADAMW_LR / MUON_LR, rel=1e-9)
    # torch cycles `betas` wherever an optimizer has both; the momentum of Muon groups stays.
    assert {momentum for _, momentum, _, _ in seen} == {0.95}
    assert (len({beta for *_, beta in seen}) > 3) == cycle_momentum
    assert all(w.isfinite().all() for w in weights(model))


def test_reduce_on_plateau_reduces_both_learning_rates():
    optimizer = optimizer_of(tiny_model())
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    scheduler.step(1.0)
    scheduler.step(1.0)
    assert lrs(optimizer) == [MUON_LR / 2, ADAMW_LR / 2]


def test_a_scheduler_is_restored_with_its_optimizer():
    def start():
        model = tiny_model()
        optimizer = optimizer_of(model)
        return model, optimizer, CosineAnnealingLR(optimizer, T_max=10)

    def run(model, optimizer, scheduler, steps):
        for step in steps:
            train(model, optimizer, [step])
            scheduler.step()

    model, optimizer, scheduler = start()
    run(model, optimizer, scheduler, range(3))
    saved = copy.deepcopy([x.state_dict() for x in (model, optimizer, scheduler)])
    run(model, optimizer, scheduler, range(3, 6))
    resumed = start()
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    run(*resumed, range(3, 6))
    assert same_bits(weights(model), weights(resumed[0]))


# Learning rate as a tensor


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_learning_rate_gives_the_weights_of_a_float(shape):
    results = []
    for kind in (float, lambda value: torch.full(shape, value)):
        model = tiny_model()
        optimizer = optimizer_of(model, muon_lr=kind(0.02), adamw_lr=kind(0.01))
        scheduler = LambdaLR(optimizer, lambda t: 1 / (1 + t))
        for step in range(3):
            train(model, optimizer, [step])
            scheduler.step()
        results.append(weights(model))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


# Closures


def test_r64_a_closure_runs_with_gradients_and_its_loss_is_returned():
    w, target = nn.Parameter(torch.eye(4)), torch.full((4, 4), 0.5)
    optimizer = dmuon.Muon([w], lr=0.02, weight_decay=0.0)
    grad_modes = []

    def closure():
        grad_modes.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (w - target).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert grad_modes == [True] * 20
    assert losses[0] == pytest.approx(4.0)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad():
        assert optimizer.step(closure=closure) < losses[-1]
    assert optimizer.step() is None


# Hooks


def test_hooks_of_an_optimizer_run_and_may_be_removed():
    model = tiny_model()
    optimizer = optimizer_of(model)
    calls = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1}),
        optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded")),
    ]
    train(model, optimizer, [0])
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert calls == ["pre", "post", "loaded"]
    for handle in handles:
        handle.remove()
    train(model, optimizer, [1])
    assert len(calls) == 3


def test_a_step_pre_hook_may_change_the_gradients():
    model, reference = tiny_model(), tiny_model()
    optimizer, expected = optimizer_of(model), optimizer_of(reference)
    optimizer.register_step_pre_hook(lambda *_: dmuon.clip_grad_norm_(optimizer, 0.1) and None)
    set_grads(model, 0)
    optimizer.step()
    set_grads(reference, 0)
    dmuon.clip_grad_norm_(expected, 0.1)
    expected.step()
    assert same_bits(weights(model), weights(reference))


def test_stepping_in_backward_hooks_works():
    # One optimizer per parameter, stepped as soon as its gradient is there.
    model, reference = tiny_model(), tiny_model()
    x = torch.randn(4, 6)
    optimizers = {}
    for p in model.parameters():
        algorithm = "muon" if p.ndim > 1 else "adamw"
        optimizers[p] = dmuon.Muon([{"params": [p], "algorithm": algorithm}], lr=0.01)
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    optimizer_of(reference, muon_lr=0.01, adamw_lr=0.01).step()
    assert same_bits(weights(model), weights(reference))


# Copies


def test_a_state_dict_survives_deepcopy_pickle_and_torch_save():
    model = tiny_model()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    state, at_two = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state)), torch.load(file)]
    train(model, optimizer, range(2, 4))
    for loaded in copies:
        other = tiny_model(seed=1)
        other.load_state_dict(at_two)
        resumed = optimizer_of(other, muon_lr=1.0, adamw_lr=1.0)
        resumed.load_state_dict(loaded)
        train(other, resumed, range(2, 4))
        assert same_bits(weights(model), weights(other))


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_of_a_model_with_its_optimizer_trains_alike_and_apart(duplicate):
    model = tiny_model()
    optimizer = optimizer_of(model, nonfinite="skip", bucket_cap_mb=1.0)
    train(model, optimizer, range(2))
    twin, twin_optimizer = duplicate((model, optimizer))
    assert set(twin_optimizer.state) == set(twin.parameters())
    at_two = weights(model)
    train(twin, twin_optimizer, range(2, 4))
    assert same_bits(weights(model), at_two)
    train(model, optimizer, range(2, 4))
    assert same_bits(weights(model), weights(twin))
    twin[0].weight.grad[0, 0] = torch.nan
    twin_optimizer.step()
    assert same_bits(weights(model), weights(twin)), "the copy forgot nonfinite='skip'"


# torch.compile


def test_a_compiled_model_trains_as_an_eager_one_and_does_not_recompile():
    torch._dynamo.reset()
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    results = []
    for compiled in (False, True):
        model = tiny_model()
        forward = torch.compile(model, backend=backend) if compiled else model
        optimizer = dmuon.Muon(dmuon.param_groups(forward, muon=["*"]), lr=0.02)
        scheduler = LambdaLR(optimizer, lambda t: 1 / (1 + t))
        for step in range(5):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            forward(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        results.append(weights(model))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert len(compilations) == 1


def test_a_compiled_step_runs_eagerly_and_gives_the_same_weights():
    # torch.compile(optimizer.step) spent minutes on tracing the planner.
    torch._dynamo.reset()
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    model, reference = tiny_model(), tiny_model()
    optimizer, expected = optimizer_of(model), optimizer_of(reference)
    step = torch.compile(optimizer.step, backend=backend)
    for i in range(3):
        set_grads(model, i)
        step()
        train(reference, expected, [i])
    assert same_bits(weights(model), weights(reference))
    assert compilations == []


def test_a_compiled_closure_stays_compiled():
    torch._dynamo.reset()
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    model = tiny_model()
    forward = torch.compile(model, backend=backend)
    optimizer = optimizer_of(model)

    def closure():
        optimizer.zero_grad()
        loss = forward(torch.ones(4, 6)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure)
    assert len(compilations) == 1


def test_r68_twelve_shapes_compile_at_most_once_each_and_never_again():
    # More shapes than torch.compile would recompile for by default.
    counters = torch._dynamo.utils.counters
    counters.clear()
    params = [nn.Parameter(torch.randn(3 + i, 20 - i)) for i in range(12)]
    optimizer = dmuon.Muon(params, lr=0.02)
    num_graphs = []
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        for p in params:
            p.grad = torch.randn(p.shape)
        optimizer.step()
        assert optimizer.stats.ns_matrices == 12
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] <= 12
    assert set(num_graphs) == {num_graphs[0]}


# Parameters that change after construction, and missing gradients


def test_a_replaced_parameter_is_trained_from_the_next_step_on():
    model, reference = tiny_model(), tiny_model()
    optimizer = optimizer_of(model)
    train(model, optimizer, [0])
    old = list(model.parameters())
    fresh = tiny_model()
    for group in optimizer.param_groups:
        group["params"] = [dict(fresh.named_parameters())[name] for name in group["param_names"]]
    train(fresh, optimizer, [1])
    train(reference, optimizer_of(reference), [1])
    assert same_bits(weights(fresh), weights(reference))
    assert not set(optimizer.state) & set(old)


def test_a_parameter_replaced_by_another_shape_splits_and_steps():
    p = nn.Parameter(torch.randn(4, 6))
    optimizer = dmuon.Muon([p], lr=0.02)
    p.grad = torch.randn(4, 6)
    optimizer.step()
    optimizer.param_groups[0]["params"] = [
        q := nn.Parameter(torch.randn(8, 3)),
        r := nn.Parameter(torch.randn(3, 3)),
    ]
    for x in (q, r):
        x.grad = torch.randn(x.shape)
    before = weights(nn.ParameterList([q, r]))
    optimizer.step()
    assert optimizer.stats.ns_matrices == 2
    assert not any(torch.equal(a, b) for a, b in zip(before, (q, r), strict=True))


def test_a_vector_that_replaces_a_matrix_is_an_error():
    p = nn.Parameter(torch.randn(4, 6))
    optimizer = dmuon.Muon([("w", p)])
    optimizer.param_groups[0]["params"] = [q := nn.Parameter(torch.randn(24))]
    q.grad = torch.randn(24)
    with pytest.raises(ValueError, match="w: Muon needs a matrix"):
        optimizer.step()


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_parameter_resized_in_place_is_an_error_until_its_state_is_removed(algorithm):
    p = nn.Parameter(torch.randn(4, 6))
    optimizer = dmuon.Muon([{"params": [("w", p)], "algorithm": algorithm}])
    p.grad = torch.randn(4, 6)
    optimizer.step()
    p.data = torch.randn(5, 6)
    p.grad = torch.randn(5, 6)
    with pytest.raises(ValueError, match=r"w: the shape, layout .*it is \(5, 6\)"):
        optimizer.step()
    del optimizer.state[p]
    before = p.detach().clone()
    optimizer.step()
    assert not torch.equal(before, p)


def test_an_algorithm_changed_in_place_is_an_error():
    p = nn.Parameter(torch.randn(4, 6))
    optimizer = dmuon.Muon([("w", p)])
    optimizer.param_groups[0]["use_muon"] = False
    p.grad = torch.randn(4, 6)
    with pytest.raises(ValueError, match="w: the shape, layout or algorithm"):
        optimizer.step()


def test_a_list_that_no_longer_fits_its_names_is_an_error():
    model = tiny_model()
    optimizer = optimizer_of(model)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.randn(3, 3))]
    with pytest.raises(ValueError, match="group 0 has 1 parameters but 2 param_names"):
        train(model, optimizer, [0])


def test_a_replaced_list_of_groups_is_read_from_the_next_step_on():
    model, reference = tiny_model(), tiny_model()
    optimizer, expected = optimizer_of(model), optimizer_of(reference)
    train(model, optimizer, [0])
    optimizer.param_groups = [dict(group, lr=0.5) for group in optimizer.param_groups]
    train(model, optimizer, [1])
    train(reference, expected, [0])
    for group in expected.param_groups:
        group["lr"] = 0.5
    train(reference, expected, [1])
    assert same_bits(weights(model), weights(reference))


@pytest.mark.parametrize("key", ["momentum_buffer", "exp_avg"])
def test_a_replaced_buffer_is_used_from_the_next_step_on(key):
    model, reference = tiny_model(), tiny_model()
    optimizer, expected = optimizer_of(model), optimizer_of(reference)
    train(model, optimizer, [0])
    train(reference, expected, [0])
    for state in optimizer.state.values():
        if key in state:
            state[key] = torch.ones_like(state[key])
    for state in expected.state.values():
        if key in state:
            state[key].fill_(1.0)
    train(model, optimizer, [1])
    train(reference, expected, [1])
    assert same_bits(weights(model), weights(reference))


def test_cleared_state_starts_afresh():
    model, reference = tiny_model(), tiny_model()
    optimizer, expected = optimizer_of(model), optimizer_of(reference)
    train(model, optimizer, [0])
    optimizer.state.clear()
    train(model, optimizer, [1])
    train(reference, expected, [0])
    train(reference, again := optimizer_of(reference), [1])
    assert same_bits(weights(model), weights(reference))
    state = zip(optimizer.state.values(), again.state.values(), strict=True)
    assert all(same_bits(a.values(), b.values()) for a, b in state)


def test_parameters_without_gradient_are_untouched_and_so_is_their_state():
    model = tiny_model()
    optimizer = optimizer_of(model)
    train(model, optimizer, [0])
    idle = [model[0].weight, model[2].bias]
    before = [(p.clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in idle]
    set_grads(model, 1)
    for p in idle:
        p.grad = None
    optimizer.step()
    for p, (weight, state) in zip(idle, before, strict=True):
        assert torch.equal(p, weight)
        assert all(torch.equal(optimizer.state[p][key], state[key]) for key in state)


def test_no_gradient_at_all_is_an_error_that_says_what_to_do():
    model = tiny_model()
    optimizer = optimizer_of(model)
    with pytest.raises(RuntimeError, match=r"0\.weight: .* Call backward\(\) first"):
        optimizer.step()


def test_adapters_train_over_a_frozen_base_without_state_for_it():
    base, a, b = (nn.Parameter(torch.randn(shape)) for shape in [(8, 8), (2, 8), (8, 2)])
    with torch.no_grad():
        b.zero_()
    base.requires_grad_(False)
    optimizer = dmuon.Muon([base, a, b], lr=0.02)
    start, after = base.clone(), []
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        (x @ (base + b @ a).T - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after.append((a.detach().clone(), b.detach().clone()))
        a.requires_grad_(False)
    assert torch.equal(base, start)
    assert base not in optimizer.state
    assert torch.equal(after[0][0], after[2][0])
    assert not torch.equal(after[1][1], after[2][1])


@pytest.mark.parametrize("nonfinite", ["ignore", None, True])
def test_an_unknown_answer_to_bad_gradients_is_refused(nonfinite):
    with pytest.raises(ValueError, match="nonfinite must be one of"):
        dmuon.Muon([nn.Parameter(torch.randn(2, 2))], nonfinite=nonfinite)


@pytest.mark.parametrize("bad", [["a"], ["b"], ["c"], ["b", "a"], ["c", "a"], ["c", "b"]])
def test_the_first_bad_gradient_is_named_among_several_dtypes(bad):
    dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32}
    params = {name: nn.Parameter(torch.randn(3, 4).to(dtype)) for name, dtype in dtypes.items()}
    optimizer = dmuon.Muon(params.items(), nonfinite="raise")
    for name, p in params.items():
        p.grad = torch.full_like(p, torch.inf if name in bad else 1.0)
    with pytest.raises(RuntimeError, match=f"^{min(bad)}: the gradient has"):
        optimizer.step()
