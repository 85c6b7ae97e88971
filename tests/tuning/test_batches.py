import math

import pytest
import torch
from dmuon.tuning.batches import orthogonalize_all, padded_shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.newton_schulz import orthogonalize, resolve_coefficients
from dmuon.tuning import batches
from dmuon.tuning.table import Choice, Table

ORIGINAL = resolve_coefficients("original")


@pytest.fixture
def stacked(monkeypatch):
    """Shapes of the stacks that are orthogonalized."""
    shapes = []

    def recorded(stack, **options):
        shapes.append(tuple(stack.shape))
        return orthogonalize(stack, **options)

    monkeypatch.setattr(batches, "orthogonalize", recorded)
    return shapes


def matrices():
    generator = torch.Generator().manual_seed(0)
    shapes = [(4 + i % 20, 9 + 3 * (i % 5)) for i in range(126)]
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    # Transposed twins, and one of another dtype.
    return [*found, *(x.mT.clone() for x in found[:10]), found[0].double()]


def test_r69_batched_result_equals_a_loop():
    inputs = matrices()
    copies = [x.clone() for x in inputs]
    found = orthogonalize_all(inputs, coefficients=ORIGINAL)
    for x, copy, y in zip(inputs, copies, found, strict=True):
        assert torch.equal(x, copy)
        assert y.dtype == x.dtype
        torch.testing.assert_close(y, orthogonalize(x, coefficients=ORIGINAL), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("limit", "calls"), [(1, 6), (4 * 4 * 6 * 2, 3), (2**20, 1)])
def test_stacks_are_bounded_and_hold_transposed_shapes(limit, calls, stacked):
    inputs = [torch.randn(4, 6), torch.randn(6, 4)] * 3
    orthogonalize_all(inputs, coefficients=ORIGINAL, max_batch_bytes=limit)
    assert len(stacked) == calls
    assert max(4 * math.prod(shape) for shape in stacked) <= max(limit, 4 * 4 * 6)


def test_no_matrices_give_no_results():
    assert orthogonalize_all([], coefficients=ORIGINAL) == []


def table_of(milliseconds, steps=5):
    """A table of float32 batches from {(batch, rows, columns): milliseconds}."""
    return Table(
        Choice("float32", *shape, steps, "newton_schulz", 1, time)
        for shape, time in milliseconds.items()
    )


NEAR = [(6, 9), (7, 9), (8, 12)]
# A call takes 10 ms and a matrix 1 ms, whatever its size: worth padding.
LAUNCH_BOUND = table_of(
    {(batch, *shape): 10.0 + batch for batch in (1, 9) for shape in [*NEAR, (4, 5)]}
)
# Time in proportion to size: not worth it.
COMPUTE_BOUND = table_of({(b, m, n): 1.0 * b * m * m * n for b in (1, 9) for m, n in NEAR})


@pytest.mark.parametrize(
    ("counts", "table", "targets"),
    [
        ({(6, 9): 2, (7, 9): 1, (8, 12): 3}, LAUNCH_BOUND, [(8, 12)] * 3),
        ({(6, 9): 2, (7, 9): 1, (8, 12): 3}, COMPUTE_BOUND, NEAR),
        ({(6, 9): 2, (7, 9): 1, (8, 12): 3}, Table(), NEAR),
        # Not measured, or larger one way and smaller the other.
        ({(5, 9): 2, (8, 12): 3, (9, 12): 1}, LAUNCH_BOUND, [(5, 9), (8, 12), (9, 12)]),
        ({(6, 20): 2, (8, 12): 3}, LAUNCH_BOUND, [(6, 20), (8, 12)]),
        # Twenty small matrices would take more than twice the memory, one does not.
        ({(4, 5): 20, (8, 12): 1}, LAUNCH_BOUND, [(4, 5), (8, 12)]),
        ({(4, 5): 1, (8, 12): 1}, LAUNCH_BOUND, [(8, 12)] * 2),
    ],
)
def test_shapes_are_padded_where_that_measures_cheaper(counts, table, targets):
    found = padded_shapes(counts, table, dtype=torch.float32, steps=5)
    assert found == dict(zip(counts, targets, strict=True))
    own = {shape: shape for shape in counts}
    assert padded_shapes(counts, table, dtype=torch.bfloat16, steps=5) == own


def test_times_of_different_numbers_of_steps_are_compared_by_the_step():
    # 13 ms for 10 steps is less than 11 ms for 5.
    table = Table([*table_of({(1, 6, 9): 13.0}, steps=10).choices, *COMPUTE_BOUND.choices])
    assert padded_shapes({(6, 9): 1, (8, 12): 1}, table, dtype=torch.float32, steps=10) == {
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
    found = padded_shapes(counts, table_of(times), dtype=torch.float32, steps=5)
    assert found.keys() == counts.keys()
    for target in set(found.values()):
        # A shape that others join keeps its own.
        assert found[target] == target
        members = [shape for shape in counts if found[shape] == target]
        assert all(small <= target[0] and large <= target[1] for small, large in members)
        own = sum(counts[s] * s[0] * s[1] for s in members)
        padded = sum(counts[s] for s in members) * target[0] * target[1]
        assert padded <= batches.MAX_PADDING * own


@pytest.mark.parametrize(
    ("limit", "stacks"), [(2**20, [(5, 8, 12)]), (3 * 8 * 12 * 4, [(3, 8, 12), (2, 8, 12)])]
)
def test_padded_matrices_give_the_same_result_in_bounded_stacks(limit, stacks, stacked):
    generator = torch.Generator().manual_seed(1)
    shapes = [(6, 9), (9, 6), (9, 7), (8, 12), (12, 8)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    inputs[2].zero_()
    expected = [orthogonalize(x, coefficients=ORIGINAL) for x in inputs]
    found = orthogonalize_all(
        inputs, coefficients=ORIGINAL, table=LAUNCH_BOUND, max_batch_bytes=limit
    )
    assert stacked == stacks
    for x, y, z in zip(inputs, found, expected, strict=True):
        assert y.shape == x.shape
        torch.testing.assert_close(y, z, atol=1e-5, rtol=0)


def test_the_bound_counts_the_dtype_of_the_iteration(stacked):
    inputs = [torch.randn(4, 6).bfloat16() for _ in range(6)]
    limit = 2 * 4 * 6 * 8
    orthogonalize_all(inputs, coefficients=ORIGINAL, dtype=torch.float64, max_batch_bytes=limit)
    assert [shape[0] for shape in stacked] == [2, 2, 2]


def test_parameters_are_taken_and_what_is_no_matrix_is_refused():
    weight = torch.nn.Parameter(torch.randn(4, 6))
    (found,) = orthogonalize_all([weight], coefficients=ORIGINAL)
    assert not found.requires_grad
    torch.testing.assert_close(found, orthogonalize(weight, coefficients=ORIGINAL))
    with pytest.raises(ValueError, match=r"matrices\[1\] has shape \(2, 4, 6\)"):
        orthogonalize_all([weight, torch.randn(2, 4, 6)], coefficients=ORIGINAL)
