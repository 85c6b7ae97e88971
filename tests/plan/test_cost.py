"""What it costs to orthogonalize a matrix."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dmuon.newton_schulz.backend import PLAIN
from dmuon.newton_schulz.plain import newton_schulz
from dmuon.plan.cost import Choice, CostModel, Timings, newton_schulz_flops


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


def choice(batch, rows, columns, milliseconds, *, steps=5, dtype="float32"):
    return Choice(dtype, batch, rows, columns, steps, PLAIN, 1, milliseconds)


def test_the_entry_of_the_nearest_steps_and_batch_counts():
    one, eight, ten = choice(1, 4, 8, 1.0), choice(8, 4, 8, 2.0), choice(1, 4, 8, 9.0, steps=10)
    timings = Timings((one, eight, ten))
    found = {batch: timings.find("float32", 5, batch, (4, 8)) for batch in (1, 4, 5, 100)}
    assert found == {1: one, 4: one, 5: eight, 100: eight}
    assert timings.find("float32", 7, 1, (4, 8)) == one
    assert timings.find("float32", 8, 8, (4, 8)) == ten
    assert timings.find("float32", 5, 1, (4, 9)) is None
    assert timings.find("bfloat16", 5, 1, (4, 8)) is None


def test_the_time_of_a_batch_is_interpolated_between_measured_ones():
    timings = Timings((choice(2, 4, 8, 15.0), choice(4, 4, 8, 20.0), choice(8, 4, 8, 50.0)))
    seconds = {batch: timings.seconds("float32", 5, batch, (4, 8)) for batch in (1, 2, 3, 4, 6, 16)}
    # Of one step.
    assert seconds == pytest.approx({1: 1.5e-3, 2: 3e-3, 3: 3.5e-3, 4: 4e-3, 6: 7e-3, 16: 20e-3})
    assert timings.seconds("float32", 5, 1, (8, 8)) is None


def test_a_step_of_one_matrix_costs_its_share_of_the_smallest_batch():
    timings = Timings(
        (
            choice(2, 4, 8, 10.0),
            choice(4, 4, 8, 12.0),
            choice(1, 4, 8, 2.0, steps=10, dtype="bfloat16"),
            choice(1, 8, 8, 3.0, steps=3),
        )
    )
    assert timings.seconds_per_step() == pytest.approx(
        {("float32", (4, 8)): 1e-3, ("bfloat16", (4, 8)): 2e-4, ("float32", (8, 8)): 1e-3}
    )


def test_the_last_of_several_choices_for_the_same_counts_and_order_does_not():
    old, new, other = choice(1, 4, 8, 1.0), choice(1, 4, 8, 2.0), choice(1, 8, 8, 1.0)
    assert Timings((old, other, new)).choices == (new, other)
    assert Timings((other, new)) == Timings((new, other))
    assert Timings((other, new)).digest == Timings((new, other)).digest != Timings((old,)).digest
    assert Timings() == Timings(())


@pytest.mark.parametrize(
    "change",
    [
        {"milliseconds": float("nan")},
        {"milliseconds": float("inf")},
        {"milliseconds": 0.0},
        {"parts": 1.5},
        {"parts": 0},
        {"rows": 25},
        {"batch": True},
        {"steps": -1},
    ],
    ids=str,
)
def test_what_is_no_measurement_is_refused(change):
    with pytest.raises(ValueError, match=r"positive integers|no measurement"):
        replace(choice(2, 8, 24, 1.5), **change)
