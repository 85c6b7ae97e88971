"""What it costs to orthogonalize a matrix."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dmuon.cost import CostModel, newton_schulz_flops
from dmuon.orthogonalize.newton_schulz import newton_schulz


@pytest.mark.parametrize("shape", [(4, 4), (4, 16), (6, 9)])
def test_flops_are_those_of_the_products_that_run(shape):
    counter = FlopCounterMode(display=False)
    with counter:
        newton_schulz(torch.ones(1, *shape), ((1.0, 0.0, 0.0),) * 3)
    assert newton_schulz_flops(shape, steps=3) == counter.get_total_flops()


def test_flops_do_not_depend_on_the_orientation():
    assert newton_schulz_flops((4, 16), 5) == newton_schulz_flops((16, 4), 5)


def test_cost_is_flops_until_something_was_measured():
    assert CostModel().cost((8, 4), steps=5) == newton_schulz_flops((4, 8), 5)


def test_measured_seconds_count_once_a_step_in_both_orientations():
    model = CostModel({(4, 8): 2.0})
    assert model.cost((4, 8), 5) == model.cost((8, 4), 5) == 10.0
    assert model.cost((4, 8), 3) == 6.0


def test_unmeasured_shape_costs_its_flops_at_the_mean_measured_rate():
    model = CostModel({(4, 4): 3.0, (8, 8): 5.0})
    flops = newton_schulz_flops((4, 4), 1) + newton_schulz_flops((8, 8), 1)
    expected = newton_schulz_flops((16, 16), 5) * 8.0 / flops
    assert model.cost((16, 16), 5) == pytest.approx(expected)
