"""The Gram form starts afresh as often as a dtype needs; singular values stay below 1.3."""

import pytest
import torch

from dmuon.newton_schulz import Backend, resolve_coefficients
from dmuon.newton_schulz.backend import BACKENDS
from dmuon.newton_schulz.coefficients import REGISTRY
from dmuon.newton_schulz.gram import gram_newton_schulz
from dmuon.newton_schulz.method import check_precision
from dmuon.newton_schulz.normalize import normalize
from dmuon.newton_schulz.restarts import safe_restarts
from tests.support.coefficients_table import (
    PAGE,
    bounds,
    can_run,
    extremes,
    mirrored,
    read_bounds,
)
from tests.support.reference import with_spectrum

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LARGEST = 1.3


@pytest.mark.parametrize(
    ("name", "bf16", "fp16", "fp32"),
    [
        ("original", (2, 4), (3,), (3,)),
        ("you", (2, 4), (2, 4), (3,)),
        ("polar_express", None, (2, 4), (3,)),
        ("polar_express_nanogpt", None, (2, 4), (3,)),
        ("polar_express_gram", (2, 4), (2, 4), (3,)),
        ("deepseek_v4", (2, 4, 6, 8), (2, 4, 6, 8), (3, 6, 9)),
        ("turbo", None, None, (3,)),
    ],
)
def test_restarts_follow_the_rounding_of_the_dtype(name, bf16, fp16, fp32):
    coefficients = resolve_coefficients(name)
    found = [safe_restarts(coefficients, dtype) for dtype in (BF16, FP16, FP32)]
    assert found == [bf16, fp16, fp32]
    assert safe_restarts(coefficients, torch.float64) == fp32


@pytest.mark.parametrize(
    ("name", "dtype", "restarts", "atleast"),
    [
        # Restarts that were taken for safe in half precision, whichever half it was.
        ("polar_express", BF16, (1, 2), 4),
        ("polar_express_nanogpt", BF16, (2,), 2),
        ("polar_express", FP16, (1, 2), 1.4),
    ],
)
def test_bfloat16_was_once_counted_as_float16(name, dtype, restarts, atleast):
    coefficients = resolve_coefficients(name)
    i = torch.arange(16)
    spectra = [torch.where(i < 8, 1.0, small) for small in (1e-2, 1e-3, 1e-4)]
    spectra += [torch.where(i < 5, 1.0, torch.where(i < 10, 0.3, 0.01)), 10.0 ** (-i / 2.5)]
    stack = torch.stack([with_spectrum(s.double(), 16, n) for s in spectra for n in range(8)])
    x = normalize(stack, eps=1e-7).to(dtype)
    y = gram_newton_schulz(x, coefficients, restarts=restarts, product=mirrored)
    assert torch.linalg.svdvals(y.double()).max() > atleast
    safe = safe_restarts(coefficients, dtype)
    if safe is not None:
        y = gram_newton_schulz(x, coefficients, restarts=safe, product=mirrored)
        assert torch.linalg.svdvals(y.double()).max() < LARGEST


def test_the_printed_bounds_stay_below_the_limit():
    printed = read_bounds(PAGE.read_text())
    assert len(printed) > 250
    assert max(pair[1] for pair in printed.values() if pair) < LARGEST
    assert printed["polar_express", "bfloat16", Backend("gram", "triton")] is None


def test_the_printed_bounds_are_the_measured_ones():
    printed = read_bounds(PAGE.read_text())
    for name, dtype, backend, found in bounds():
        known = printed.pop((name, dtype, backend))
        assert (known is None) == (found is None)
        if found is not None:
            # Sums of half precision may be ordered otherwise on another machine.
            assert found == pytest.approx(known, abs=0.05), (name, dtype, backend)
            assert found[1] < LARGEST
    assert not printed


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("steps", [1, 2, 3, 6, 8, 12])
def test_other_numbers_of_steps_stay_below_the_limit_too(name, steps):
    try:
        coefficients = resolve_coefficients(name, steps)
    except ValueError:
        return  # it exceeds the limit in exact arithmetic
    for dtype in (BF16, FP16):
        try:
            check_precision(coefficients, dtype)
        except ValueError:
            continue
        for backend in [b for b in BACKENDS if can_run(b, coefficients, dtype)]:
            assert extremes(coefficients, backend, dtype)[1] < LARGEST, (dtype, backend)


@pytest.mark.timeout(20)
def test_long_lists_are_not_searched_for_ever():
    coefficients = resolve_coefficients("original", 99)
    assert safe_restarts(coefficients, BF16) == tuple(range(2, 99, 2))
    assert safe_restarts(coefficients, FP32) == tuple(range(3, 99, 3))
