"""Which matrices a parameter holds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dmuon.layout.matrices import Block, Matrix, Piece, matrices_of, runs_size


def view_of(tensor, block):
    """The matrix that a block selects from a whole parameter."""
    tensor = tensor.flatten(1) if block.flatten else tensor[block.batch]
    return tensor[slice(*block.rows), slice(*block.cols)]


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((6, 4), {}, [(6, 4)]),
        ((8, 3, 3, 3), {"flatten": True}, [(8, 27)]),
        ((6, 4, 3), {"flatten": True}, [(6, 12)]),
        ((4, 6, 8), {}, [(6, 8)] * 4),
        ((2, 3, 4, 5), {}, [(4, 5)] * 6),
        ((12, 16), {"split": ((8, 2, 2), 0)}, [(8, 16), (2, 16), (2, 16)]),
        ((8, 8), {"split": ((2, 6), 1)}, [(8, 2), (8, 6)]),
        ((2, 8, 4), {"split": ((4, 4), 0)}, [(4, 4)] * 4),
        ((0, 6, 8), {}, []),
    ],
)
def test_matrices_are_stacked_slices_flattened_kernels_and_blocks(shape, options, expected):
    assert [matrix.shape for matrix in matrices_of("p", shape, **options)] == expected


@given(st.data())
def test_matrices_tile_the_parameter(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4)))
    flatten = data.draw(st.booleans())
    dim = 0 if flatten else data.draw(st.integers(0, 1))
    size = shape[0] if flatten else shape[-2:][dim]
    first = data.draw(st.integers(0, size - 1))
    split = ((first, size - first), dim) if first else None
    whole = torch.arange(math.prod(shape)).view(shape)
    found = matrices_of("p", shape, flatten=flatten, split=split)
    covered = [i for m in found for i in view_of(whole, m.block).flatten().tolist()]
    assert sorted(covered) == list(range(whole.numel()))
    assert all(view_of(whole, m.block).shape == m.shape for m in found)
    assert sum(m.numel for m in found) == whole.numel()


def test_order_of_matrices_is_total_and_that_of_storage():
    found = matrices_of("p", (3, 4, 6), split=((1, 3), 0))
    keys = [matrix.sort_key for matrix in found]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(found) == 6


def test_matrix_is_named_by_its_parameter_and_place():
    assert str(Matrix("layers.0.w", Block((2, 1), (0, 4), (3, 8)))) == "layers.0.w[2][1][0:4, 3:8]"


def test_piece_counts_its_runs():
    piece = Piece((slice(0, 3), slice(0, 4)), rows=((0, 2), (5, 6)), cols=((1, 5),))
    assert (piece.shape, piece.numel) == ((3, 4), 12)
    assert runs_size(()) == 0
