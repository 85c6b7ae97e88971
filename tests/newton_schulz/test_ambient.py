"""No setting of the surroundings reaches the numbers."""

import contextlib

import pytest
import torch

from dmuon.newton_schulz import Method, exact_arithmetic, orthogonalize, orthogonalize_stack, polar
from dmuon.newton_schulz.backend import PLAIN
from dmuon.newton_schulz.coefficients import resolve_coefficients

CUDA, CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def matmul_precision(name):
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


SURROUNDINGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
    "deterministic": deterministic,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "matmul high": lambda: matmul_precision("high"),
    "matmul medium": lambda: matmul_precision("medium"),
}


@pytest.mark.parametrize("backend", ["auto", "gram+blocks", "newton_schulz+dense"])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_orthogonalize_is_the_same_in_any_surroundings(name, backend):
    x = torch.randn(3, 20, 30, generator=torch.Generator().manual_seed(0))
    expected = orthogonalize(x, backend=backend)
    with SURROUNDINGS[name]():
        found = orthogonalize(x, backend=backend)
    assert torch.equal(found, expected)
    assert (found.dtype, found.device) == (x.dtype, x.device)


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_stack_is_the_same_inside_exact_arithmetic(name):
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    method = Method(resolve_coefficients("original"), 1e-7, torch.float32)
    expected = orthogonalize_stack(x, method, PLAIN)
    with SURROUNDINGS[name](), exact_arithmetic("cpu"):
        assert torch.equal(orthogonalize_stack(x, method, PLAIN), expected)


def test_no_gradient_flows_and_the_mode_stays_as_it_was():
    x = torch.randn(4, 6, requires_grad=True)
    assert not orthogonalize(x).requires_grad
    assert torch.is_grad_enabled()


def newer(*settings):
    def set_all():
        for place, value in settings:
            place.fp32_precision = value

    return set_all


PRECISIONS = {
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(CUDA, "allow_tf32", True),
    "newer, everywhere": newer((torch.backends, "tf32"), (CUDA, "none"), (CPU, "none")),
    "newer, CUDA": newer((CUDA, "tf32")),
    "newer, CPU": newer((CPU, "bf16")),
}


@pytest.fixture
def precision(request):
    PRECISIONS[request.param]()
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", PRECISIONS, indirect=True)
def test_float32_products_are_whole_inside_and_as_before_after(precision, monkeypatch):
    def settings():
        return CUDA.fp32_precision, CPU.fp32_precision

    seen, right, before = [], polar.newton_schulz, settings()
    # Torch refuses to read the older setting where the newer one says otherwise.
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = None

    def newton_schulz(x, coefficients, *, product):
        seen.append((settings(), torch.get_float32_matmul_precision()))
        return right(x, coefficients, product=product)

    monkeypatch.setattr(polar, "newton_schulz", newton_schulz)
    orthogonalize(torch.ones(2, 3))
    ((inside, older_inside),) = seen
    assert set(inside) <= {"ieee", "none"}
    assert older_inside == "highest"
    assert settings() == before
    if older is not None:
        assert torch.get_float32_matmul_precision() == older


def test_settings_come_back_after_an_error():
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ZeroDivisionError), exact_arithmetic("cpu"):
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
