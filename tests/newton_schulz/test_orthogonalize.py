import sys

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode

import dmuon
from dmuon.newton_schulz import (
    Backend,
    Method,
    choice,
    orthogonalize,
    orthogonalize_stack,
    polar,
    resolve_coefficients,
)
from dmuon.newton_schulz.backend import BACKENDS, PLAIN
from dmuon.newton_schulz.choice import cached_parts, choose_backend, obstacle
from dmuon.newton_schulz.gram import gram_newton_schulz
from dmuon.newton_schulz.products import diagonal_side
from tests.support.reference import (
    map_singular_values,
    reference_newton_schulz,
    reference_orthogonalize,
    with_spectrum,
)

ORIGINAL = resolve_coefficients("original")
CPU_BACKENDS = [backend for backend in BACKENDS if backend.product in {"dense", "blocks"}]


def inputs():
    generator = torch.Generator().manual_seed(1)
    steps = torch.arange(48, dtype=torch.float64)
    yield "random", torch.randn(48, 48, generator=generator)
    yield "tall", torch.randn(130, 48, generator=generator)
    yield "wide", torch.randn(70, 257, generator=generator)
    yield "ill conditioned", with_spectrum(torch.logspace(0, -6, 48, dtype=torch.float64), 100)
    yield "rank deficient", with_spectrum((steps < 8).double(), 100)
    yield "repeated sigma", with_spectrum(torch.where(steps < 24, 1.0, 1e-3), 100)
    yield "row", torch.randn(1, 33, generator=generator)
    yield "one", torch.full((1, 1), -3.0)
    yield "batched", torch.randn(2, 3, 40, 65, generator=generator)
    yield "in blocks", torch.randn(300, 470, generator=generator)


@pytest.mark.parametrize("backend", ["auto", *CPU_BACKENDS])
@pytest.mark.parametrize("name", ["original", "polar_express", "you"])
@pytest.mark.parametrize(("case", "x"), list(inputs()), ids=[case for case, _ in inputs()])
def test_singular_values_are_mapped_by_the_scalar_polynomial(case, x, name, backend):
    coefficients = resolve_coefficients(name)
    found = orthogonalize(x, coefficients=coefficients, backend=backend)
    assert found.shape == x.shape
    sigma = torch.linalg.svdvals(x.double())
    expected = map_singular_values(sigma / sigma.norm(dim=-1, keepdim=True), coefficients)
    # Polar Express multiplies a rounding error of the input by up to 990, in any form.
    tolerance = 3e-5 if name == "polar_express" else 1e-5
    torch.testing.assert_close(
        torch.linalg.svdvals(found.double()),
        expected.sort(descending=True).values,
        atol=tolerance,
        rtol=0,
    )


def test_the_two_references_agree():
    for _, x in inputs():
        torch.testing.assert_close(
            reference_newton_schulz(x, ORIGINAL),
            reference_orthogonalize(x, ORIGINAL),
            atol=1e-9,
            rtol=0,
        )


@pytest.mark.parametrize("shape", [(30, 60), (60, 30), (64, 64)])
def test_equals_torch_muon_in_its_dtype_to_rounding(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = _zeropower_via_newtonschulz(x.clone(), ORIGINAL[0], 5, 1e-7)
    found = orthogonalize(x, coefficients=ORIGINAL, backend="newton_schulz+dense")
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() <= 0.02 * expected.norm()


# Relative to float64 in the Frobenius norm. For Polar Express on a Gaussian of 256 x 1024, emulated
# rounding gives .009 plain and .012 Gram in bfloat16, .001 and .0016 in float16; the matrix here is
# smaller and its spectrum wider.
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        ("newton_schulz+dense", torch.bfloat16, 0.024),
        ("newton_schulz+dense", torch.float16, 0.003),
        ("gram+dense", torch.bfloat16, 0.04),
        ("gram+dense", torch.float16, 0.006),
    ],
)
@pytest.mark.parametrize("name", ["original", "you", "polar_express_gram"])
def test_half_precision_stays_within_the_error_table(backend, dtype, tolerance, name):
    coefficients = resolve_coefficients(name)
    x = torch.randn(32, 96, generator=torch.Generator().manual_seed(3))
    found = orthogonalize(x, coefficients=coefficients, dtype=dtype, backend=backend)
    assert found.dtype == torch.float32
    expected = reference_orthogonalize(x, coefficients)
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_output_has_the_shape_and_dtype_of_the_input(dtype):
    for shape in [(0, 4), (4, 0), (0, 3, 5), (2, 0, 5), (1, 7), (7, 1), (2, 3, 4, 5)]:
        x = torch.randn(shape, dtype=torch.float64).to(dtype)
        found = orthogonalize(x, coefficients=ORIGINAL, dtype=torch.float32)
        assert found.shape == x.shape
        assert found.dtype == dtype


@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1e-12, 1e-7, 1.0, 1e20, 1e37])
def test_result_does_not_depend_on_the_scale(scale):
    # A floor under the norm (eps) once shrank the update of clipped gradients to nothing.
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    scaled = (x * scale).float()
    expected = reference_orthogonalize(scaled, ORIGINAL)
    for backend in ["auto", *CPU_BACKENDS]:
        found = orthogonalize(scaled, coefficients=ORIGINAL, backend=backend)
        torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=0)


def test_half_inputs_are_normalized_in_float32():
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))
    for scale, dtype in [(6e4 / 5, torch.float16), (1e-4, torch.float16), (1e30, torch.bfloat16)]:
        low = (x * scale).to(dtype)
        found = orthogonalize(low, coefficients=ORIGINAL, dtype=torch.float32)
        expected = reference_orthogonalize(low, ORIGINAL)
        assert (found - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("backend", ["auto", *CPU_BACKENDS])
def test_zero_and_non_finite_matrices_leave_their_batch_alone(backend):
    x = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(6))
    clean = orthogonalize(x, coefficients=ORIGINAL, backend=backend)
    dirty = x.clone()
    dirty[0] *= 2**13
    dirty[1] = 0
    dirty[2, 1, 3] = float("inf")
    dirty[3, 0, 0] = float("nan")
    found = orthogonalize(dirty, coefficients=ORIGINAL, backend=backend)
    assert torch.equal(found[1], torch.zeros(4, 6))
    assert not found[2].isfinite().any()
    assert not found[3].isfinite().any()
    torch.testing.assert_close(found[[0, 4]], clean[[0, 4]], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("auto", torch.bfloat16), *((backend, torch.float32) for backend in ["auto", *CPU_BACKENDS])],
)
def test_input_is_never_written(backend, dtype):
    base = torch.randn(12, 20, generator=torch.Generator().manual_seed(7)).to(dtype)
    for view in [base, base.mT, base[::2, 1::3], base.reshape(2, 6, 20), base[:1]]:
        before = base.clone()
        found = orthogonalize(view, coefficients=ORIGINAL, backend=backend)
        assert torch.equal(base, before)
        assert found.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()


@pytest.mark.parametrize("backend", ["auto", *CPU_BACKENDS])
@pytest.mark.parametrize("shape", [(40, 40), (33, 80), (2, 17, 5), (300, 290)])
def test_transposing_the_input_transposes_the_output(backend, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(8))
    found = orthogonalize(x.mT, coefficients=ORIGINAL, backend=backend)
    expected = orthogonalize(x, coefficients=ORIGINAL, backend=backend).mT
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(8, 16), (64, 64), (260, 300), (256, 600)])
def test_r69_a_matrix_does_not_depend_on_its_batch(shape):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(9))
    together = orthogonalize(x, coefficients=ORIGINAL)
    alone = torch.stack([orthogonalize(matrix, coefficients=ORIGINAL) for matrix in x])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (2, 16, 16), (1, 9)])
def test_aol_orthogonalizes_the_row_scaled_matrix(shape):
    turbo = resolve_coefficients("turbo")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(11))
    wide = (x.mT if shape[-2] > shape[-1] else x).double()
    scaled = wide / (wide @ wide.mT).abs().sum(dim=-1, keepdim=True).sqrt()
    u, sigma, vh = torch.linalg.svd(scaled, full_matrices=False)
    assert sigma.max() <= 1 + 1e-12
    expected = u @ (map_singular_values(sigma, turbo).unsqueeze(-1) * vh)
    found = orthogonalize(x, coefficients=turbo, aol=True).double()
    torch.testing.assert_close(
        found.mT if shape[-2] > shape[-1] else found, expected, atol=1e-5, rtol=0
    )
    zero = orthogonalize(torch.zeros(shape), coefficients=turbo, aol=True)
    assert torch.equal(zero, torch.zeros(shape))


@pytest.mark.parametrize("restarts", [(), (1,), (2,), (1, 3), (1, 2, 3, 4)])
def test_gram_form_equals_the_plain_form_for_any_restarts(restarts):
    x = torch.randn(2, 20, 50, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    x /= x.norm(dim=(1, 2), keepdim=True)
    found = gram_newton_schulz(x, ORIGINAL, restarts=restarts)
    torch.testing.assert_close(found, reference_newton_schulz(x, ORIGINAL), atol=1e-11, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 90)),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-30, 30),
    name=st.sampled_from(["original", "polar_express", "you", "deepseek_v4"]),
    backend=st.sampled_from(["auto", *CPU_BACKENDS]),
)
def test_any_random_matrix_is_mapped_as_in_float64(shape, seed, exponent, name, backend):
    coefficients = resolve_coefficients(name)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    found = orthogonalize(x, coefficients=coefficients, backend=backend)
    expected = reference_orthogonalize(x, coefficients)
    # Directions of a nearly zero singular value are only defined up to its gain times rounding.
    gain = max(1.0, expected.abs().max().item())
    relative = (found - expected).norm() / (gain * expected.norm())
    assert relative <= 1e-3
    torch.testing.assert_close(
        torch.linalg.svdvals(found.double()), torch.linalg.svdvals(expected), atol=1e-3, rtol=0
    )


def test_the_public_function_needs_no_coefficients_and_takes_names_triples_and_lists():
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(13))
    expected = reference_orthogonalize(x, ORIGINAL)
    for spec in ({}, {"coefficients": ORIGINAL[0]}, {"coefficients": [list(t) for t in ORIGINAL]}):
        torch.testing.assert_close(
            dmuon.orthogonalize(x, **spec).double(), expected, atol=1e-5, rtol=0
        )
    three = dmuon.orthogonalize(x, coefficients="you", steps=3)
    you = reference_orthogonalize(x, resolve_coefficients("you", 3))
    torch.testing.assert_close(three.double(), you, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="known names"):
        dmuon.orthogonalize(x, coefficients="jordan")


@pytest.mark.parametrize("product", ["dense", "blocks"])
def test_a_backend_is_taken_as_a_pair_or_as_text(product):
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(14))
    named = Backend("gram", product)
    assert Backend.parse(str(named)) == named
    assert torch.equal(orthogonalize(x, backend=named), orthogonalize(x, backend=f"gram+{product}"))


@pytest.mark.parametrize(
    ("x", "backend", "message"),
    [
        (torch.ones(3), "auto", "matrices"),
        (torch.ones(3, 3, dtype=torch.int32), "auto", "floating"),
        (torch.ones(3, 3).to(torch.float8_e4m3fn), "auto", "floating"),
        (torch.ones(3, 3), "quick", "known"),
        (torch.ones(3, 3), "gram_blocks", "known"),
        (torch.ones(0, 3), "quick", "known"),
        (torch.ones(3, 3), "gram+triton", "CUDA"),
        (torch.ones(3, 3), Backend("newton_schulz", "quack"), "CUDA"),
    ],
)
def test_misuse_is_refused(x, backend, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize(x, backend=backend)


def test_gram_form_is_refused_where_it_is_not_safe():
    x = torch.randn(8, 32)
    with pytest.raises(ValueError, match=r"is not safe in torch\.bfloat16"):
        orthogonalize(x, coefficients="polar_express", dtype=torch.bfloat16, backend="gram+dense")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_list_that_diverges_in_half_precision_is_refused_there(dtype):
    # It peaks on the edge of its interval: rounding takes a singular value across, and away.
    x = torch.randn(64, 256)
    with pytest.raises(ValueError, match=r"rounds.*wider dtype"):
        orthogonalize(x, coefficients="cans", dtype=dtype)
    assert orthogonalize(x, coefficients="cans").isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool, torch.float8_e5m2])
def test_a_dtype_that_cannot_be_iterated_is_refused(dtype):
    with pytest.raises(ValueError, match="floating-point"):
        orthogonalize(torch.ones(3, 4), coefficients=ORIGINAL, dtype=dtype)


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "reason"),
    [
        ("gram+dense", "cpu", torch.float32, None),
        ("newton_schulz+triton", "cuda", torch.float32, None),
        ("gram+triton", "cuda", torch.float64, "bfloat16"),
        ("newton_schulz+blocks", "cuda", torch.float32, "CPU"),
        ("newton_schulz+quack", "cuda", torch.float32, "bfloat16"),
        ("newton_schulz+quack", "cuda", torch.bfloat16, "cannot be imported"),
    ],
)
def test_a_backend_says_what_it_needs(backend, device, dtype, reason):
    found = obstacle(Backend.parse(backend), ORIGINAL, torch.device(device), dtype)
    assert (found is None) if reason is None else (reason in found)


QUACK = Backend("gram", "quack")


@pytest.mark.parametrize("broken", ["__init__.py", "gemm_interface.py"])
def test_a_package_that_fails_to_import_is_an_obstacle(broken, tmp_path, monkeypatch):
    (tmp_path / "quack").mkdir()
    for name in ("__init__.py", "gemm_interface.py"):
        code = "raise RuntimeError('no driver')" if name == broken else ""
        (tmp_path / "quack" / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    choice.is_importable.cache_clear()
    reason = obstacle(QUACK, ORIGINAL, torch.device("cuda"), torch.bfloat16)
    assert "cannot be imported" in reason
    choice.is_importable.cache_clear()
    sys.modules.pop("quack", None)


def test_a_kernel_is_not_offered_to_an_older_gpu(monkeypatch):
    monkeypatch.setattr(choice, "is_importable", lambda module: True)
    for capability, usable in [((8, 0), False), ((9, 0), True), ((10, 0), True)]:
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        reason = obstacle(QUACK, ORIGINAL, torch.device("cuda"), torch.bfloat16)
        assert (reason is None) == usable


@pytest.mark.parametrize(
    ("limit", "sizes"), [(1, [1] * 7), (3 * 2 * 4 * (6 + 4) * 4, [3, 2, 2]), (2**30, [7])]
)
def test_a_batch_is_iterated_in_parts_that_the_caches_hold(limit, sizes, monkeypatch):
    x = torch.randn(7, 4, 6, generator=torch.Generator().manual_seed(12))
    expected = torch.stack([orthogonalize(each) for each in x])
    seen = []

    def newton_schulz(part, coefficients, *, product):
        seen.append(len(part))
        return right(part, coefficients, product=product)

    right = polar.newton_schulz
    monkeypatch.setattr(polar, "newton_schulz", newton_schulz)
    monkeypatch.setattr(choice, "CACHE_BYTES", limit)
    torch.testing.assert_close(orthogonalize(x), expected, atol=1e-6, rtol=0)
    assert seen == sizes
    assert cached_parts(7, (4, 6), torch.float32, "cpu") == len(sizes)
    assert cached_parts(7, (4, 6), torch.float32, "cuda") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_a_stack_gives_what_the_public_function_gives(dtype, parts):
    x = torch.randn(5, 6, 9, generator=torch.Generator().manual_seed(15))
    method = Method(ORIGINAL, 1e-7, dtype)
    found = orthogonalize_stack(x, method, PLAIN, parts)
    expected = orthogonalize(x, dtype=dtype, backend=PLAIN)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    assert found.dtype == torch.float32


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_a_stack_dispatches_a_fixed_number_of_operators():
    method = Method(ORIGINAL, 1e-7, torch.float32)
    numbers = set()
    for batch in (1, 500):
        with CountOps() as count:
            orthogonalize_stack(torch.ones(batch, 4, 6), method, PLAIN)
        numbers.add(count.number)
    (number,) = numbers
    # Four a step (one of them a view), and the normalization.
    assert number <= 4 * 5 + 14


def test_equal_methods_look_equal_and_others_differ():
    base = Method(ORIGINAL, 1e-7, torch.float32)
    others = [
        Method(resolve_coefficients("you"), 1e-7, torch.float32),
        Method(ORIGINAL[:4], 1e-7, torch.float32),
        Method(ORIGINAL, 1.00000001e-7, torch.float32),
        Method(ORIGINAL, 1e-7, torch.bfloat16),
        Method(ORIGINAL, 1e-7, torch.float32, aol=True),
    ]
    assert len({base, *others}) == len({str(method) for method in (base, *others)}) == 6
    assert Method(ORIGINAL, 1e-7, torch.float32) == base
    assert str(Method(ORIGINAL, 1e-7, torch.float32)) == str(base)


@pytest.mark.parametrize(
    ("size", "side", "blocks"),
    [
        (64, 64, False),
        (128, 64, False),
        (256, 64, False),
        (320, 80, True),
        (321, 321, False),
        (330, 165, False),
        (384, 96, True),
        (450, 225, False),
        (512, 64, True),
        (642, 321, True),
        (999, 999, False),
        (1000, 125, True),
    ],
)
def test_auto_takes_blocks_where_enough_is_saved(size, side, blocks):
    assert diagonal_side(size) == side
    for length in (size, 4 * size):
        chosen = choose_backend((size, length), ORIGINAL, dtype=torch.float32, device_type="cpu")
        assert (chosen.product == "blocks") == blocks


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("auto", torch.float32),
        ("newton_schulz+dense", torch.float32),
        ("gram+dense", torch.float32),
        ("gram+dense", torch.bfloat16),
    ],
)
def test_compiles_without_graph_breaks_and_without_recompiling(backend, dtype):
    counter = torch._dynamo.testing.CompileCounter()
    shapes = [(8, 16 + 4 * i) for i in range(12)]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=len(shapes)):
        compiled = torch.compile(
            lambda x: orthogonalize(x, coefficients=ORIGINAL, backend=backend, dtype=dtype),
            backend=counter,
            fullgraph=True,
        )
        for shape in shapes:
            x = torch.randn(shape)
            expected = orthogonalize(x, coefficients=ORIGINAL, backend=backend, dtype=dtype)
            tolerance = 1e-4 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(compiled(x), expected, atol=tolerance, rtol=0)
        assert counter.frame_count <= len(shapes)
        before = counter.frame_count
        for shape in shapes:
            compiled(torch.randn(shape))
    assert counter.frame_count == before
