"""What it costs to orthogonalize a matrix."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dmuon.newton_schulz.plain import newton_schulz
from dmuon.plan.cost import CostModel, newton_schulz_flops


@pytest.mark.parametrize("shape", [(4, 4), (4, 16), (6, 9)])
def test_flops_are_those_of_the_products_that_run(shape):
    counter = FlopCounterMode(display=False)
    with counter:
        newton_schulz(torch.ones(1, *shape), ((1.0, 0.0, 0.0),) * 3)
    assert newton_schulz_flops(shape, steps=3) == counter.get_total_flops()


def test_flops_do_not_depend_on_the_orientation():
    assert newton_schulz_flops((4, 16), 5) == newton_schulz_flops((16, 4), 5)


def test_cost_is_flops_until_something_was_measured():
    assert CostModel().cost((8, 4), 5, "float32") == newton_schulz_flops((4, 8), 5)


def test_measured_seconds_count_once_a_step_in_both_orientations_and_by_dtype():
    model = CostModel({("float32", (4, 8)): 2.0, ("bfloat16", (4, 8)): 1.0})
    assert model.cost((4, 8), 5, "float32") == model.cost((8, 4), 5, "float32") == 10.0
    assert model.cost((4, 8), 3, "bfloat16") == 3.0


def test_unmeasured_shape_costs_its_flops_at_the_mean_measured_rate():
    times = {("float32", (4, 4)): 3.0, ("float32", (8, 8)): 5.0}
    model = CostModel({**times, ("bfloat16", (8, 8)): 1.0})
    flops = {side: newton_schulz_flops((side, side), 1) for side in (4, 8, 16)}
    expected = 5 * flops[16] * 8.0 / (flops[4] + flops[8])
    assert model.cost((16, 16), 5, "float32") == pytest.approx(expected)
    assert model.cost((16, 16), 5, "bfloat16") == pytest.approx(5 * flops[16] * 1.0 / flops[8])
    # Nothing was measured in that dtype.
    every = 5 * flops[16] * 9.0 / (flops[4] + 2 * flops[8])
    assert model.cost((16, 16), 5, "float16") == pytest.approx(every)
