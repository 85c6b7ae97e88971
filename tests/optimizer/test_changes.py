"""Parameters, groups and state that change after construction."""

import pytest
import torch
from torch import nn

import dmuon
from tests.support.loops import optimizer_of, same_bits, tiny_model, train, weights


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
    with pytest.raises(ValueError, match="'muon' and use_muon=False do not go together"):
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
