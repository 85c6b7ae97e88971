import pytest
import torch

from dmuon.orthogonalize import batches, orthogonalize, orthogonalize_all, resolve_coefficients

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
