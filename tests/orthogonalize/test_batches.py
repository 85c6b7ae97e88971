import pytest
import torch

from dmuon.orthogonalize import batches, orthogonalize, orthogonalize_all, resolve_coefficients
from dmuon.orthogonalize.batches import padded_shapes
from dmuon.orthogonalize.table import Choice

ORIGINAL = resolve_coefficients("original")


def matrices():
    generator = torch.Generator().manual_seed(0)
    shapes = [(4 + i % 20, 9 + 3 * (i % 5)) for i in range(126)]
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    # Transposed twins, and one of another dtype.
    return [*found, *(x.mT.clone() for x in found[:10]), found[0].double()]


def test_batched_result_equals_a_loop():
    inputs = matrices()
    copies = [x.clone() for x in inputs]
    found = orthogonalize_all(inputs, coefficients=ORIGINAL)
    for x, copy, y in zip(inputs, copies, found, strict=True):
        assert torch.equal(x, copy)
        assert y.dtype == x.dtype
        torch.testing.assert_close(y, orthogonalize(x, coefficients=ORIGINAL), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("limit", "calls"), [(1, 6), (4 * 4 * 6 * 2, 3), (2**20, 1)])
def test_stacks_are_bounded_and_hold_transposed_shapes(limit, calls, monkeypatch):
    sizes = []

    def counted(stack, **options):
        sizes.append(stack.numel() * 4)
        return orthogonalize(stack, **options)

    monkeypatch.setattr(batches, "orthogonalize", counted)
    inputs = [torch.randn(4, 6), torch.randn(6, 4)] * 3
    orthogonalize_all(inputs, coefficients=ORIGINAL, max_batch_bytes=limit)
    assert len(sizes) == calls
    assert max(sizes) <= max(limit, 4 * 4 * 6)


def test_no_matrices_give_no_results():
    assert orthogonalize_all([], coefficients=ORIGINAL) == []


def table_of(milliseconds):
    """A table of float32 batches from {(batch, rows, columns): milliseconds}."""
    choices = [
        Choice("float32", *shape, 5, "newton_schulz", 1, time)
        for shape, time in milliseconds.items()
    ]
    return {choice.key: choice for choice in choices}


# A call takes 10 ms and a matrix 1 ms, whatever its size: worth padding.
LAUNCH_BOUND = table_of(
    {(batch, *shape): 10.0 + batch for batch in (1, 9) for shape in [(6, 9), (7, 9), (8, 12)]}
)
# Time in proportion to size: not worth it.
COMPUTE_BOUND = table_of(
    {(b, m, n): b * m * m * n for b in (1, 9) for m, n in [(6, 9), (7, 9), (8, 12)]}
)


@pytest.mark.parametrize(
    ("counts", "table", "targets"),
    [
        ({(6, 9): 2, (7, 9): 1, (8, 12): 3}, LAUNCH_BOUND, [(8, 12)] * 3),
        ({(6, 9): 2, (7, 9): 1, (8, 12): 3}, COMPUTE_BOUND, [(6, 9), (7, 9), (8, 12)]),
        ({(6, 9): 2, (7, 9): 1, (8, 12): 3}, {}, [(6, 9), (7, 9), (8, 12)]),
        # Not measured, or larger one way and smaller the other.
        ({(5, 9): 2, (8, 12): 3, (9, 12): 1}, LAUNCH_BOUND, [(5, 9), (8, 12), (9, 12)]),
        ({(6, 20): 2, (8, 12): 3}, LAUNCH_BOUND, [(6, 20), (8, 12)]),
    ],
)
def test_shapes_are_padded_where_that_measures_cheaper(counts, table, targets):
    found = padded_shapes(counts, table, torch.float32)
    assert found == dict(zip(counts, targets, strict=True))
    assert padded_shapes(counts, table, torch.bfloat16) == {shape: shape for shape in counts}


def test_padded_matrices_give_the_same_result_in_one_call(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    shapes = [(6, 9), (9, 6), (9, 7), (8, 12), (12, 8)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    inputs[2].zero_()
    expected = [orthogonalize(x, coefficients=ORIGINAL) for x in inputs]
    sizes = []

    def counted(stack, **options):
        sizes.append(tuple(stack.shape))
        return orthogonalize(stack, **options)

    monkeypatch.setattr(batches, "orthogonalize", counted)
    found = orthogonalize_all(inputs, coefficients=ORIGINAL, table=LAUNCH_BOUND)
    assert sizes == [(5, 8, 12)]
    for x, y, z in zip(inputs, found, expected, strict=True):
        assert y.shape == x.shape
        torch.testing.assert_close(y, z, atol=1e-5, rtol=0)
