"""What a training loop does with an optimizer of torch: closures, hooks, copies."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import dmuon
from tests.support.loops import (
    optimizer_of,
    same_bits,
    set_grads,
    tiny_model,
    train,
    weights,
)


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
