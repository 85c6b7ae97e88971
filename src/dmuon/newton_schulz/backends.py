"""What can iterate: a form of Newton-Schulz with a symmetric product, and on what it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module

import torch
from torch import Tensor

from dmuon.newton_schulz.gram import gram_newton_schulz
from dmuon.newton_schulz.plain import newton_schulz
from dmuon.newton_schulz.quintic import Coefficients
from dmuon.newton_schulz.restarts import safe_restarts
from dmuon.newton_schulz.symmetric import SymmetricProduct, block_product, dense_product

HALF = frozenset({torch.float16, torch.bfloat16})
DTYPES = HALF | {torch.float32, torch.float64}


def _load_triton() -> SymmetricProduct:
    from dmuon.newton_schulz.kernels.symmetric import triton_product  # noqa: PLC0415

    return triton_product


def _load_quack() -> SymmetricProduct:
    from dmuon.newton_schulz.kernels.quack import quack_product  # noqa: PLC0415

    return quack_product


@cache
def is_importable(module: str) -> bool:
    """Return whether a module of another package can be imported, after importing it."""
    try:
        import_module(module)
    except Exception:  # noqa: BLE001 - whatever that package raises
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Product:
    """A symmetric product, and on what it runs.

    Attributes:
        load: Returns it, and imports what only it needs.
        device_type: The only type of device that it runs on; None for any.
        dtypes: The only dtypes that it takes; None for any.
        module: What must be installed beside torch.
        capability: The lowest compute capability of a CUDA device that it runs on.
    """

    load: Callable[[], SymmetricProduct]
    device_type: str | None = None
    dtypes: frozenset[torch.dtype] | None = None
    module: str | None = None
    capability: tuple[int, int] | None = None

    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why it cannot run there, or None."""
        if self.device_type is not None and device.type != self.device_type:
            return f"needs a {self.device_type.upper()} tensor, got one on {device}"
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"takes {' or '.join(sorted(map(str, self.dtypes)))}, got {dtype}"
        if self.module is not None and not is_importable(self.module):
            return f"needs {self.module}, which cannot be imported"
        if self.capability is not None:
            found = torch.cuda.get_device_capability(device)
            if found < self.capability:
                return f"needs compute capability {self.capability}, {device} has {found}"
        return None


_FORMS = ("newton_schulz", "gram")
_PRODUCTS = {
    "": _Product(lambda: dense_product),
    "_blocks": _Product(lambda: block_product, device_type="cpu"),
    "_triton": _Product(
        _load_triton, device_type="cuda", dtypes=HALF | {torch.float32}, module="triton"
    ),
    "_quack": _Product(
        _load_quack,
        device_type="cuda",
        dtypes=HALF,
        module="quack.gemm_interface",
        capability=(9, 0),
    ),
}
BACKENDS = tuple(form + product for form in _FORMS for product in _PRODUCTS)


def obstacle(
    backend: str, coefficients: Coefficients, *, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why one of `BACKENDS` cannot run on matrices of `dtype` on `device`, or None.

    Raises:
        ValueError: The backend is unknown.
    """
    form, product = split_name(backend)
    if form == "gram" and safe_restarts(coefficients, half=dtype in HALF) is None:
        return f"has no known restarts that make it safe in {dtype} for {coefficients}"
    return product.obstacle(device, dtype)


def iteration(backend: str, x: Tensor, coefficients: Coefficients) -> Callable[[Tensor], Tensor]:
    """Return the named iteration.

    Raises:
        ValueError: The backend is unknown, or cannot run on `x`.
    """
    reason = obstacle(backend, coefficients, device=x.device, dtype=x.dtype)
    if reason is not None:
        raise ValueError(f"backend {backend!r} {reason}; use another one or 'auto'")
    form, product = split_name(backend)
    if form == "newton_schulz":
        return partial(newton_schulz, coefficients=coefficients, product=product.load())
    return partial(
        gram_newton_schulz,
        coefficients=coefficients,
        restarts=safe_restarts(coefficients, half=x.dtype in HALF) or (),
        product=product.load(),
    )


def split_name(backend: str) -> tuple[str, _Product]:
    """Return the form and the product that the name of a backend is made of.

    Raises:
        ValueError: The backend is unknown.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; known: {('auto', *BACKENDS)}")
    form = next(form for form in _FORMS if backend.startswith(form))
    return form, _PRODUCTS[backend.removeprefix(form)]
