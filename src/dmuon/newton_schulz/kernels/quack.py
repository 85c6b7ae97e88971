"""The symmetric GEMM of quack-kernels, where that package is installed."""

# The package is optional and has no type stubs.
# mypy: disable-error-code="import-untyped, import-not-found, no-any-return"

from quack.gemm_interface import gemm_symmetric
from torch import Tensor

from dmuon.newton_schulz.products import Terms, add_identity_, dense_product

# Its loads are 16 bytes wide: eight numbers of half precision.
_ALIGNMENT = 8


def quack_product(left_BMK: Tensor, right_BKM: Tensor, terms: Terms) -> Tensor:
    """Compute half the tiles with `quack.gemm_interface.gemm_symmetric`: a `SymmetricProduct`.

    Sides that it cannot load are computed whole, as in `dense_product`.
    """
    _, size, depth = left_BMK.shape
    if size % _ALIGNMENT or depth % _ALIGNMENT:
        return dense_product(left_BMK, right_BKM, terms)
    alpha, add_BMM, beta, gamma = terms
    result_BMM = gemm_symmetric(left_BMK, right_BKM, C=add_BMM, alpha=alpha, beta=beta)
    return add_identity_(result_BMM, gamma)
