import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dmuon


def params_with_grads(*shapes, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(dtype)
    return params


def mixed_optimizer():
    matrices, vectors = params_with_grads((6, 4), (5, 5)), params_with_grads((7,), (3,))
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}]
    return dmuon.Muon(groups), matrices, vectors


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5),
    st.sampled_from([1.0, 2.0, 3.5, math.inf]),
    st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_norm_and_gradients_are_those_of_torch(shapes, norm_type, max_norm):
    ours, theirs = params_with_grads(*shapes), params_with_grads(*shapes)
    norm = dmuon.clip_grad_norm_(ours, max_norm, norm_type)
    full = [p for p in theirs if p.numel()]
    expected = torch.nn.utils.clip_grad_norm_(full, max_norm, norm_type)
    torch.testing.assert_close(norm, torch.as_tensor(expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_the_norm_is_a_float32_scalar_and_accepts_one_tensor_or_a_generator():
    (p,) = params_with_grads((3, 4))
    expected = p.grad.norm()
    for form in (p, (q for q in [p])):
        norm = dmuon.clip_grad_norm_(form, math.inf)
        assert norm.shape == ()
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, expected)


def test_the_norm_of_half_precision_gradients_is_taken_in_float32():
    params = params_with_grads((300, 300), (200, 500), dtype=torch.bfloat16)
    exact = math.sqrt(sum(p.grad.double().square().sum().item() for p in params))
    assert dmuon.clip_grad_norm_(params, 1.0).item() == pytest.approx(exact, rel=1e-6)
    assert all(p.grad.dtype == torch.bfloat16 for p in params)
    clipped = math.sqrt(sum(p.grad.double().square().sum().item() for p in params))
    assert clipped == pytest.approx(1, rel=1e-2)


def test_scaled_gradients_of_mixed_precision_stay_in_their_dtypes():
    half, single = params_with_grads((4, 4), dtype=torch.float16) + params_with_grads((3,))
    dmuon.clip_grad_norm_([half, single], 0.1)
    assert (half.grad.dtype, single.grad.dtype) == (torch.float16, torch.float32)


def test_a_policy_chooses_what_is_scaled_but_not_what_is_measured():
    norms = {}
    for policy in ("all", "adamw_only"):
        optimizer, matrices, vectors = mixed_optimizer()
        before = [p.grad.clone() for p in matrices + vectors]
        norms[policy] = dmuon.clip_grad_norm_(optimizer, 0.5, policy=policy)
        factor = 0.5 / norms[policy].item()
        factors = [factor if policy == "all" else 1.0] * 2 + [factor] * 2
        for p, old, scale in zip(matrices + vectors, before, factors, strict=True):
            torch.testing.assert_close(p.grad, old * scale)
    assert torch.equal(norms["all"], norms["adamw_only"])


def test_the_gradients_are_untouched_when_the_norm_is_small_enough():
    params = params_with_grads((4, 3), (5,))
    before = [p.grad.clone() for p in params]
    for max_norm in (100.0, math.inf):
        dmuon.clip_grad_norm_(params, max_norm)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))


def test_a_frozen_parameter_and_one_without_gradient_do_not_count():
    live, frozen, idle = params_with_grads((3, 3), (3, 3), (3, 3))
    idle.grad = None
    frozen.requires_grad_(False)
    stale = frozen.grad.clone()
    expected = live.grad.norm()
    torch.testing.assert_close(dmuon.clip_grad_norm_([live, frozen, idle], 0.1), expected)
    assert torch.equal(frozen.grad, stale)
    assert dmuon.clip_grad_norm_([], 1.0) == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_norm_that_is_not_finite_raises_on_request_and_leaves_the_gradients(bad, norm_type):
    params = params_with_grads((4, 3), (5,))
    params[0].grad[1, 1] = bad
    before = [p.grad.clone() for p in params]
    with pytest.raises(RuntimeError, match=r"gradient norm .* is (inf|nan)"):
        dmuon.clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
    for p, g in zip(params, before, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=0, equal_nan=True)
    assert not dmuon.clip_grad_norm_(params, 1.0, norm_type).isfinite()


def test_misuse_says_what_to_do():
    params = params_with_grads((2, 2))
    with pytest.raises(ValueError, match="'adamw_only' needs the optimizer"):
        dmuon.clip_grad_norm_(params, 1.0, policy="adamw_only")
    with pytest.raises(ValueError, match="'muon' is unknown; use 'all' or 'adamw_only'"):
        dmuon.clip_grad_norm_(params, 1.0, policy="muon")
    for norm_type in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="norm_type must be > 0"):
            dmuon.clip_grad_norm_(params, 1.0, norm_type)


def test_any_torch_optimizer_may_be_given():
    params = params_with_grads((3, 3), (4,))
    expected = torch.cat([p.grad.flatten() for p in params]).norm()
    torch.testing.assert_close(dmuon.clip_grad_norm_(torch.optim.SGD(params), 0.1), expected)


def test_r35_a_muon_step_does_not_depend_on_the_clip_value():
    # Elsewhere a clip of the orthogonalized update became the learning rate.
    weights = {}
    for max_norm in (math.inf, 0.5, 1.0, 4.0):
        params = params_with_grads(*[(64, 64)] * 4)
        optimizer = dmuon.Muon(params, lr=0.02)
        assert dmuon.clip_grad_norm_(optimizer, max_norm) > 100
        optimizer.step()
        weights[max_norm] = torch.stack([p.detach() for p in params])
    start = torch.stack([p.detach() for p in params_with_grads(*[(64, 64)] * 4)])
    assert (weights[math.inf] - start).abs().max() > 1e-3
    for max_norm in (0.5, 1.0, 4.0):
        torch.testing.assert_close(weights[max_norm], weights[math.inf], rtol=0, atol=2e-6)
