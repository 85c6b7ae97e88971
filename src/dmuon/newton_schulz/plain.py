"""The plain quintic Newton-Schulz iteration, on the matrix itself."""

import torch
from torch import Tensor

from dmuon.newton_schulz.polynomial import Coefficients
from dmuon.newton_schulz.products import ALONE, SymmetricProduct, Terms, dense_product


def newton_schulz(
    x_BMN: Tensor, coefficients: Coefficients, *, product: SymmetricProduct = dense_product
) -> Tensor:
    """Apply `X <- aX + (bA + cA^2) X` with `A = X X^T` once per `(a, b, c)`.

    Costs `4 M^2 N + 2 M^3` FLOPs a step and a matrix, so M should be the smaller side.

    Args:
        x_BMN: Matrices of Frobenius norm at most 1, (B, M, N). Not modified.
        coefficients: One `(a, b, c)` per step.
        product: Computes the symmetric products `A` and `bA + cA^2`.
    """
    for a, b, c in coefficients:
        gram_BMM = product(x_BMN, x_BMN.mT, ALONE)
        update_BMM = product(gram_BMM, gram_BMM, Terms(c, gram_BMM, b))
        x_BMN = torch.baddbmm(x_BMN, update_BMM, x_BMN, beta=a)
    return x_BMN
