"""Settings of the surroundings that would reach the numbers, and the one place that undoes them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def exact_arithmetic(device_type: str) -> Iterator[None]:
    """Multiply in the dtype that was asked for, whatever the surroundings say.

    Turns off autocast, and the reduced precision (TF32, bfloat16) of float32 products that
    `torch.set_float32_matmul_precision` and `fp32_precision` allow: checks of lists and restarts
    count on the rounding of the dtype, and ranks on equal settings. For faster products than those
    of float32 ask for bfloat16. Under `torch.compile` only autocast is turned off.

    Args:
        device_type: Where the matrices are.
    """
    with contextlib.ExitStack() as stack:
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if not torch.compiler.is_compiling():
            products = _products()
            if any(product.fp32_precision not in {"none", "ieee"} for product in products):
                stack.enter_context(_full_float32())
        yield


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Forbid reduced precision by the older settings where those are in use: the two must agree."""
    products = _products()
    newer = [product.fp32_precision for product in products]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # only the newer ones are in use
        older = None
    if older is not None:
        torch.set_float32_matmul_precision("highest")
    for product in products:
        product.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for product, precision in zip(products, newer, strict=True):
            product.fp32_precision = precision


def _products() -> tuple[Any, Any]:
    """Return where torch keeps the precision of float32 products."""
    backends: Any = torch.backends  # whose types lack `mkldnn.matmul`
    return backends.cuda.matmul, backends.mkldnn.matmul
