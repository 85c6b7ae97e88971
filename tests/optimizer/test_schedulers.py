"""Learning rates that change: torch's schedulers, tensors as learning rates."""

import copy

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from tests.support.loops import (
    ADAMW_LR,
    MUON_LR,
    optimizer_of,
    same_bits,
    tiny_model,
    train,
    weights,
)


def lrs(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


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
