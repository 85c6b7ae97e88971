"""The step that docs/design.md shows on one screen."""

import pytest
import torch
from torch import nn

import dmuon


# --8<-- [start:step]
def muon_step_(W, G, B, lr, weight_decay=0.1, mu=0.95):
    """Take one step on a weight W (M, N) with gradient G and momentum B, both in place."""
    B.lerp_(G, 1 - mu)  # momentum: mu B + (1 - mu) G
    U = G.lerp(B, mu)  # Nesterov: (1 - mu) G + mu B
    X = U if U.shape[0] <= U.shape[1] else U.T  # so that X X^T is the small product
    X = X / X.norm()  # singular values are at most 1 ...
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X  # ... and go towards 1
    X = X if U.shape[0] <= U.shape[1] else X.T
    scale = max(1, U.shape[0] / U.shape[1]) ** 0.5  # adjust_lr_fn="original"
    W.mul_(1 - lr * weight_decay).sub_(lr * scale * X)


# --8<-- [end:step]


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_the_step_on_the_design_page_is_that_of_the_optimizer(shape):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    W, B = weight.detach().clone(), torch.zeros_like(weight)
    optimizer = dmuon.Muon([weight], lr=0.02, ns_dtype=torch.float64)
    for _ in range(3):
        weight.grad = torch.randn(shape, dtype=torch.float64)
        optimizer.step()
        muon_step_(W, weight.grad, B, lr=0.02)
    torch.testing.assert_close(weight.detach(), W, rtol=0, atol=1e-12)
