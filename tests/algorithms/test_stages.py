"""The arithmetic around orthogonalization."""

import math

import pytest
import torch

from dmuon.algorithms import ADJUST_LR_FNS, lr_scale
from dmuon.algorithms.stages import apply_, momentum_, nesterov


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((4096, 1024), (2.0, 12.8, 64.0, 2.0, 11.52, 1.0)),
        ((1024, 4096), (1.0, 12.8, 64.0, 0.5, 11.52, 1.0)),
        ((1024, 1024), (1.0, 6.4, 32.0, 1.0, 5.76, 1.0)),
    ],
)
def test_lr_scale_of_every_named_mode(shape, scales):
    names = ("original", "match_rms_adamw", "spectral", "spectral_unclamped")
    names += ("deepseek_v4", "none")
    assert names == ADJUST_LR_FNS
    for name, scale in zip(names, scales, strict=True):
        assert lr_scale(name, shape) == pytest.approx(scale, rel=1e-12)


def test_lr_scale_without_a_name_is_original():
    assert lr_scale(None, (12, 4)) == lr_scale("original", (12, 4)) == math.sqrt(3)


def test_lr_scale_of_a_function_is_what_it_says_about_rows_and_cols():
    assert lr_scale(lambda shape: shape[0] + 10 * shape[1], (3, 4)) == 43.0


def test_lr_scale_of_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'rms' is unknown; use one of original, match_rms_adamw"):
        lr_scale("rms", (4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_is_an_exponential_moving_average(dtype):
    buffers = [torch.full((2, 3), 2.0, dtype=dtype), torch.full((4,), -1.0, dtype=dtype)]
    grads = [torch.full((2, 3), 4.0, dtype=dtype), torch.full((4,), 1.0, dtype=dtype)]
    momentum_(buffers, grads, 0.75)
    assert torch.equal(buffers[0], torch.full((2, 3), 2.5, dtype=dtype))
    assert torch.equal(buffers[1], torch.full((4,), -0.5, dtype=dtype))
    assert torch.equal(grads[0], torch.full((2, 3), 4.0, dtype=dtype))


def test_nesterov_mixes_the_gradient_into_the_advanced_momentum_and_writes_neither():
    (buffer,), (grad,) = [torch.tensor([2.0])], [torch.tensor([4.0])]
    (ahead,) = nesterov([buffer], [grad], 0.75)
    assert ahead.item() == 0.25 * 4.0 + 0.75 * 2.0
    assert (buffer.item(), grad.item()) == (2.0, 4.0)


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5), torch.tensor([0.5])])
def test_decay_uses_the_plain_lr_and_the_update_the_scaled_one(lr):
    params = [torch.tensor([4.0]), torch.tensor([[8.0, 0.0]])]
    updates = [torch.tensor([1.0]), torch.tensor([[2.0, -1.0]])]
    apply_(params, updates, scale=3.0, lr=lr, weight_decay=0.25)
    assert params[0].item() == 4.0 * (1 - 0.125) - 1.5
    assert params[1].tolist() == [[8.0 * (1 - 0.125) - 3.0, 1.5]]


def test_float32_update_of_bfloat16_parameter_is_rounded_once():
    param = torch.tensor([1.0], dtype=torch.bfloat16)
    # Just over half a unit in the last place; rounded to bfloat16 first it would be a tie.
    apply_([param], [torch.tensor([2.0**-9 * 1.003])], scale=1.0, lr=1.0, weight_decay=0.0)
    assert param.item() == 1.0 - 2.0**-8


def test_nothing_to_do_is_allowed():
    momentum_([], [], 0.9)
    assert nesterov([], [], 0.9) == []
    apply_([], [], scale=1.0, lr=0.1, weight_decay=0.1)
