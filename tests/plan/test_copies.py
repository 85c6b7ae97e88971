"""Merged copies move the same elements as the copies one by one."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmuon.plan.copies import Copy, contiguous, merge

UNTOUCHED = -1


def indices(shape, first, strides):
    """Where the elements of a block lie in a flat buffer."""
    ranges = [stride * np.arange(size) for size, stride in zip(shape, strides, strict=True)]
    return first + sum(np.ix_(*ranges), start=np.zeros(shape, dtype=int))


def carry_out(copies, target, source):
    """What copies do, element by element. Modifies: `target`."""
    for copy in copies:
        into = indices(copy.shape, copy.target, copy.target_strides)
        assert len(np.unique(into)) == into.size
        assert into.min() >= 0
        target[into] = source[indices(copy.shape, copy.source, copy.source_strides)]


def result_of(copies):
    """A target after copies from a source of distinct numbers."""
    ends = [
        (
            1 + indices(copy.shape, copy.source, copy.source_strides).max(),
            1 + indices(copy.shape, copy.target, copy.target_strides).max(),
        )
        for copy in copies
    ]
    sizes = np.max(ends, axis=0, initial=0)
    target = np.full(sizes[1], UNTOUCHED)
    carry_out(copies, target, np.arange(sizes[0]))
    return target


def numel(copies):
    return sum(math.prod(copy.shape) for copy in copies)


@st.composite
def tilings(draw):
    """The rectangles of a target matrix, in any order, from anywhere in the source."""
    borders = [sorted(draw(st.sets(st.integers(0, 12), min_size=2, max_size=6))) for _ in range(2)]
    width, is_transposed = borders[1][-1] + draw(st.integers(0, 2)), draw(st.booleans())
    from_one_matrix, copies = draw(st.booleans()), []
    for (r0, r1), (c0, c1) in itertools.product(*map(itertools.pairwise, borders)):
        strides = (width, 1) if from_one_matrix else draw(st.sampled_from([(5, 1), (1, 7), (3, 2)]))
        first = r0 * width + c0 if from_one_matrix else draw(st.integers(0, 40))
        into = (r0 + 12 * c0, (1, 12)) if is_transposed else (r0 * width + c0, (width, 1))
        copies.append(Copy((r1 - r0, c1 - c0), first, strides, *into))
    return draw(st.permutations(copies)) if draw(st.booleans()) else copies


@st.composite
def progressions(draw):
    """Equal blocks at equal distances, which is what pieces of equal matrices are."""
    copies, end = [], 0
    for _ in range(draw(st.integers(1, 3))):
        rows, cols, count = (draw(st.integers(1, 4)) for _ in range(3))
        gap = draw(st.integers(0, 3))
        # Sources may overlap, stand still or run backwards: torch has no negative strides.
        step, first = draw(st.integers(-6, 12)), draw(st.integers(30, 40))
        width = cols + draw(st.integers(0, 2))
        for i in range(count):
            target = end + i * (rows * cols + gap)
            copies.append(Copy((rows, cols), first + i * step, (width, 1), target, (cols, 1)))
        end += count * (rows * cols + gap)
    return copies


COPIES = st.one_of(tilings(), progressions())


@given(COPIES)
def test_merged_copies_move_the_same_elements(copies):
    merged = merge(copies)
    np.testing.assert_array_equal(result_of(merged), result_of(copies))
    assert numel(merged) == numel(copies)
    assert len(merged) <= len(copies)


@given(COPIES)
def test_merging_again_changes_nothing(copies):
    assert merge(merge(copies)) == merge(copies)


@given(COPIES)
def test_strides_of_merged_copies_are_positive_and_no_dim_is_of_one_element(copies):
    for copy in merge(copies):
        assert min(*copy.source_strides, *copy.target_strides) > 0
        assert copy.shape == (1,) or min(copy.shape) > 1


def gathered(num_matrices, num_ranks, rows=2, cols=3):
    """What an owner pastes: by rank, its shard of each matrix; in the stack they lie by matrix."""
    return [
        Copy(
            (rows, cols),
            (rank * num_matrices + i) * rows * cols,
            (cols, 1),
            (i * num_ranks + rank) * rows * cols,
            (cols, 1),
        )
        for rank in range(num_ranks)
        for i in range(num_matrices)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("num_matrices", [1, 2, 7, 100])
def test_even_shards_of_equal_matrices_are_one_copy(num_matrices, num_ranks):
    assert len(merge(gathered(num_matrices, num_ranks))) == 1


def test_transposed_pieces_of_equal_matrices_are_one_copy():
    copies = [Copy((4, 3), 12 * i, (3, 1), 12 * i, (1, 4)) for i in range(9)]
    (copy,) = merge(copies)
    assert copy == Copy((9, 4, 3), 0, (12, 3, 1), 0, (12, 1, 4))


def test_rows_one_behind_the_other_become_one_run():
    rows = [Copy((1, 4), 8 + 4 * i, (9, 1), 4 * i, (7, 1)) for i in range(5)]
    assert merge(rows) == (Copy((20,), 8, (1,), 0, (1,)),)


def test_nothing_is_merged_into_nothing():
    assert merge([]) == ()


@given(COPIES, st.integers(0, 200))
def test_a_buffer_is_aliased_only_where_it_would_hold_just_the_same(copies, size):
    merged = merge(copies)
    for numel_of_target in {size, numel(copies)}:
        start = contiguous(merged, numel_of_target)
        target = result_of(merged)
        repeats = (
            len(target) == numel_of_target
            and len(np.flatnonzero(target != UNTOUCHED)) == numel_of_target
            and (np.diff(target) == 1).all()
        )
        # Where the copies are not one, equality may go unseen: that costs a copy, no more.
        assert (start is not None) == (repeats and len(merged) == 1)
        if start is not None:
            assert target[0] == start


def test_a_part_of_a_source_may_stand_for_a_target():
    assert contiguous(merge([Copy((2, 3), 6, (3, 1), 0, (3, 1))]), 6) == 6
    assert contiguous(merge([Copy((2, 3), 6, (3, 1), 0, (3, 1))]), 7) is None
    assert contiguous(merge([Copy((2, 3), 6, (3, 1), 1, (3, 1))]), 6) is None
    assert contiguous(merge([Copy((2, 3), 6, (4, 1), 0, (3, 1))]), 6) is None
    assert contiguous((), 0) is None
