"""Which matrices share a call, and what runs them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.newton_schulz import Backend, Method, resolve_coefficients
from dmuon.newton_schulz.backend import PLAIN
from dmuon.newton_schulz.choice import choose_backend
from dmuon.plan import batches
from dmuon.plan.batches import batch_shapes, padded_shapes, resolve_backend
from dmuon.plan.cost import Choice, Timings

ORIGINAL = resolve_coefficients("original")
METHOD = Method(ORIGINAL, 1e-7, torch.float32)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def timings_of(milliseconds, steps=5):
    """Return timings of float32 batches from {(batch, rows, columns): milliseconds}."""
    return Timings(
        tuple(
            Choice("float32", *shape, steps, PLAIN, 1, time) for shape, time in milliseconds.items()
        )
    )


NEAR = [(6, 9), (7, 9), (8, 12)]
# A call takes 10 ms and a matrix 1 ms, whatever its size: worth padding.
LAUNCH_BOUND = timings_of(
    {(batch, *shape): 10.0 + batch for batch in (1, 9) for shape in [*NEAR, (4, 5)]}
)
# Time in proportion to size: not worth it.
COMPUTE_BOUND = timings_of({(b, m, n): 1.0 * b * m * m * n for b in (1, 9) for m, n in NEAR})


def test_equal_shapes_up_to_transposition_share_a_stack():
    shapes = [(4, 6), (3, 3), (6, 4), (4, 6), (3, 4)]
    found = batch_shapes(shapes, Timings(), dtype="float32", steps=5)
    assert found == [((4, 6), [0, 2, 3]), ((3, 3), [1]), ((3, 4), [4])]
    assert batch_shapes([], Timings(), dtype="float32", steps=5) == []


def test_near_shapes_share_a_stack_where_that_measures_cheaper():
    found = batch_shapes([(9, 6), (8, 12), (7, 9)], LAUNCH_BOUND, dtype="float32", steps=5)
    assert [(shape, sorted(indices)) for shape, indices in found] == [((8, 12), [0, 1, 2])]


@pytest.mark.parametrize(
    ("counts", "timings", "targets"),
    [
        ({(6, 9): 2, (7, 9): 1, (8, 12): 3}, LAUNCH_BOUND, [(8, 12)] * 3),
        ({(6, 9): 2, (7, 9): 1, (8, 12): 3}, COMPUTE_BOUND, NEAR),
        ({(6, 9): 2, (7, 9): 1, (8, 12): 3}, Timings(), NEAR),
        # Not measured, or larger one way and smaller the other.
        ({(5, 9): 2, (8, 12): 3, (9, 12): 1}, LAUNCH_BOUND, [(5, 9), (8, 12), (9, 12)]),
        ({(6, 20): 2, (8, 12): 3}, LAUNCH_BOUND, [(6, 20), (8, 12)]),
        # Twenty small matrices would take more than twice the memory, one does not.
        ({(4, 5): 20, (8, 12): 1}, LAUNCH_BOUND, [(4, 5), (8, 12)]),
        ({(4, 5): 1, (8, 12): 1}, LAUNCH_BOUND, [(8, 12)] * 2),
    ],
)
def test_shapes_are_padded_where_that_measures_cheaper(counts, timings, targets):
    found = padded_shapes(counts, timings, dtype="float32", steps=5)
    assert found == dict(zip(counts, targets, strict=True))
    own = {shape: shape for shape in counts}
    assert padded_shapes(counts, timings, dtype="bfloat16", steps=5) == own


def test_times_of_different_numbers_of_steps_are_compared_by_the_step():
    # 13 ms for 10 steps is less than 11 ms for 5.
    ten = timings_of({(1, 6, 9): 13.0}, steps=10)
    timings = Timings((*ten.choices, *COMPUTE_BOUND.choices))
    assert padded_shapes({(6, 9): 1, (8, 12): 1}, timings, dtype="float32", steps=10) == {
        (6, 9): (6, 9),
        (8, 12): (8, 12),
    }


@settings(max_examples=200, deadline=None)
@given(
    counts=st.dictionaries(
        st.tuples(st.integers(1, 9), st.integers(9, 12)), st.integers(1, 30), max_size=6
    ),
    data=st.data(),
)
def test_padding_is_bounded_and_holds_every_matrix(counts, data):
    times = {
        (batch, *shape): data.draw(st.floats(0.1, 10.0)) for batch in (1, 40) for shape in counts
    }
    found = padded_shapes(counts, timings_of(times), dtype="float32", steps=5)
    assert found.keys() == counts.keys()
    for target in set(found.values()):
        # A shape that others join keeps its own.
        assert found[target] == target
        members = [shape for shape in counts if found[shape] == target]
        assert all(small <= target[0] and large <= target[1] for small, large in members)
        own = sum(counts[s] * s[0] * s[1] for s in members)
        padded = sum(counts[s] for s in members) * target[0] * target[1]
        assert padded <= batches.MAX_PADDING * own


def test_the_measured_backend_of_the_nearest_batch_runs():
    rows = [(1, Backend("gram", "dense"), 1), (8, Backend("gram", "triton"), 4)]
    choices = (Choice("float32", batch, 4, 8, 5, backend, p, 1.0) for batch, backend, p in rows)
    timings = Timings(tuple(choices))
    assert resolve_backend(METHOD, timings, 2, (4, 8), CPU) == (Backend("gram", "dense"), 1)
    assert resolve_backend(METHOD, timings, 9, (4, 8), CUDA) == (Backend("gram", "triton"), 4)
    assert resolve_backend(METHOD, timings, 9, (4, 9), CUDA) == (PLAIN, 1)


@pytest.mark.parametrize("product", ["triton", "quack", "dense"])
def test_a_choice_that_cannot_run_here_goes_to_the_default(product):
    # Not safe in bfloat16, in Gram form.
    method = Method(resolve_coefficients("polar_express"), 1e-7, torch.bfloat16)
    timings = Timings((Choice("bfloat16", 1, 4, 32, 5, Backend("gram", product), 1, 1.0),))
    default = choose_backend((4, 32), method.coefficients, dtype=method.dtype, device_type="cpu")
    assert resolve_backend(method, timings, 1, (4, 32), CPU) == (default, 1)


def test_stacks_on_cpu_are_split_into_what_the_caches_hold():
    assert resolve_backend(METHOD, Timings(), 2000, (16, 16), CPU)[1] == 4
    assert resolve_backend(METHOD, Timings(), 2000, (16, 16), CUDA)[1] == 1
