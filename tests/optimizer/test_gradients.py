"""Missing, infinite and NaN gradients in one process."""

import pytest
import torch
from torch import nn

import dmuon
from tests.support.loops import optimizer_of, set_grads, tiny_model, train


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
