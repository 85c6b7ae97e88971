"""Which backend can iterate a list in a dtype on a device, and which one runs by default."""

from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch

from dmuon.newton_schulz.backend import PLAIN, Backend, Form, Product
from dmuon.newton_schulz.method import DTYPES
from dmuon.newton_schulz.polynomial import Coefficients
from dmuon.newton_schulz.products import (
    SymmetricProduct,
    block_product,
    dense_product,
    diagonal_side,
)
from dmuon.newton_schulz.restarts import safe_restarts

# Measured on CPU. Where halving takes less off a side, blocks do not pay for their copies.
SMALLEST_HALVED = 240
# Below, or for M x N nearer to a square, the plain form is as fast as the Gram form.
SMALLEST_GRAM = 128
GRAM_ASPECT = 2
# What is iterated at a time on CPU, so that it stays in the caches; the best of 0.5 to 8 MiB.
CACHE_BYTES = 2 * 2**20
_HALF = (torch.bfloat16, torch.float16)


@cache
def is_importable(module: str) -> bool:
    """Return whether a module of another package can be imported, after importing it."""
    try:
        import_module(module)
    except Exception:  # noqa: BLE001 - whatever that package raises
        return False
    return True


class _Needs(NamedTuple):
    """What a product needs: a type of device, one of some dtypes, a module, a GPU's capability."""

    device_type: str
    dtypes: tuple[torch.dtype, ...] = DTYPES
    module: str | None = None
    capability: tuple[int, int] = (0, 0)

    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != self.device_type:
            return f"needs a {self.device_type.upper()} tensor, got one on {device}"
        if dtype not in self.dtypes:
            return f"takes {' or '.join(map(str, self.dtypes))}, got {dtype}"
        if self.module and not is_importable(self.module):
            return f"needs {self.module}, which cannot be imported"
        if self.capability > (0, 0):
            found = torch.cuda.get_device_capability(device)
            if found < self.capability:
                return f"needs compute capability {self.capability}, {device} has {found}"
        return None


_NEEDS: dict[Product, _Needs] = {
    # Three roundings a product, which half precision feels.
    "blocks": _Needs("cpu", (torch.float32, torch.float64)),
    "triton": _Needs("cuda", (*_HALF, torch.float32), "triton"),
    "quack": _Needs("cuda", _HALF, "quack.gemm_interface", (9, 0)),
}


def obstacle(
    backend: Backend, coefficients: Coefficients, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why a backend cannot iterate matrices of `dtype` on `device` by a list, or None."""
    if backend.form == "gram" and safe_restarts(coefficients, dtype) is None:
        return f"is not safe in {dtype} for {coefficients}, with any restarts that save work"
    needs = _NEEDS.get(backend.product)
    return None if needs is None else needs.obstacle(device, dtype)


def choose_backend(
    shape: tuple[int, int], coefficients: Coefficients, *, dtype: torch.dtype, device_type: str
) -> Backend:
    """Return what runs for matrices of a shape (M, N) with M <= N when nothing was measured.

    A function of its arguments alone, so every rank chooses the same, for any number of matrices.
    """
    size, length = shape
    if device_type != "cpu" or dtype in _HALF:
        return PLAIN
    long = size >= SMALLEST_GRAM and length >= GRAM_ASPECT * size
    gram = long and safe_restarts(coefficients, dtype) is not None
    form: Form = "gram" if gram else "newton_schulz"
    halved = size - diagonal_side(size) >= SMALLEST_HALVED
    return Backend(form, "blocks" if halved else "dense")


def cached_parts(batch: int, shape: tuple[int, int], dtype: torch.dtype, device_type: str) -> int:
    """Return in how many parts a stack on CPU is iterated, so that each stays in the caches; or 1.

    Args:
        batch: Matrices in the stack.
        shape: Of each, (M, N) with M <= N.
        dtype: In which they are iterated.
        device_type: Where.
    """
    if device_type != "cpu":
        return 1
    size, length = shape
    # The matrix and its successor, the Gram matrix and the update.
    matrix_bytes = 2 * size * (length + size) * dtype.itemsize
    return max(1, -(-batch // max(1, CACHE_BYTES // max(1, matrix_bytes))))


def load_product(product: Product) -> SymmetricProduct:
    """Return the implementation of a product; only now imports what it alone needs."""
    if product == "triton":
        from dmuon.newton_schulz.kernels.triton import triton_product  # noqa: PLC0415

        return triton_product
    if product == "quack":
        from dmuon.newton_schulz.kernels.quack import quack_product  # noqa: PLC0415

        return quack_product
    return dense_product if product == "dense" else block_product
