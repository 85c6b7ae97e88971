"""Newton-Schulz in Gram form: the iteration runs on the small M x M matrix `X X^T`.

Zhang, Amsel, Chen and Dao 2026 (Dao-AILab/gram-newton-schulz). A run of steps multiplies X from
the left by a polynomial Q in R = X X^T, so R and Q can be advanced alone and X be touched once.
Rounding makes R slightly indefinite and its small eigenvalues grow with every step, hence the
restarts: X takes in Q, and R is computed afresh.
"""

import itertools

import torch
from torch import Tensor

from dmuon.newton_schulz.polynomial import Coefficients
from dmuon.newton_schulz.products import (
    ALONE,
    SymmetricProduct,
    Terms,
    add_identity_,
    dense_product,
)


def gram_newton_schulz(
    x_BMN: Tensor,
    coefficients: Coefficients,
    *,
    restarts: tuple[int, ...],
    product: SymmetricProduct = dense_product,
) -> Tensor:
    """Apply the quintic iteration of `newton_schulz` through the Gram matrix.

    Costs `4 M^2 N` FLOPs for each of the `len(restarts) + 1` segments, half of the first `2 M^2 N`
    with a `product` that uses symmetry, plus 3 to 4 symmetric `2 M^3` products a step.

    Args:
        x_BMN: Matrices of Frobenius norm at most 1, (B, M, N). Not modified.
        coefficients: One `(a, b, c)` per step.
        restarts: Steps before which R is computed afresh, increasing; from `safe_restarts`.
        product: Computes the symmetric products.
    """
    borders = (0, *restarts, len(coefficients))
    for start, stop in itertools.pairwise(borders):
        gram_BMM = product(x_BMN, x_BMN.mT, ALONE)
        x_BMN = torch.bmm(_segment_factor(gram_BMM, coefficients[start:stop], product), x_BMN)
    return x_BMN


def _segment_factor(r_BMM: Tensor, segment: Coefficients, product: SymmetricProduct) -> Tensor:
    """Return Q such that the steps of `segment` take X with `X X^T = R` to `Q X`."""
    (a, b, c), *rest = segment
    if not rest:
        return product(r_BMM, r_BMM, Terms(c, r_BMM, b, a))
    z_BMM = product(r_BMM, r_BMM, Terms(c, r_BMM, b))
    q_BMM = add_identity_(z_BMM.clone(), a)
    for next_a, b, c in rest:
        half_BMM = product(r_BMM, z_BMM, Terms(1.0, r_BMM, a))
        r_BMM = product(half_BMM, z_BMM, Terms(1.0, half_BMM, a))
        a = next_a
        z_BMM = product(r_BMM, r_BMM, Terms(c, r_BMM, b))
        q_BMM = product(q_BMM, z_BMM, Terms(1.0, q_BMM, a))
    return q_BMM
