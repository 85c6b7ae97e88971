"""The algorithm that docs/algorithms.md writes: what is on the page is what the optimizer does."""

import pytest
import torch
from torch import nn

import dmuon
from dmuon.algorithms import ALGORITHMS, lr_scale
from dmuon.newton_schulz import orthogonalize
from tests.support.parity import LR, check, fsdp_specs, run_parity, seeded
from tests.support.scaled_muon import SCALED_MUON


@pytest.fixture
def registered(monkeypatch):
    """The algorithm has an entry during a test."""
    monkeypatch.setitem(ALGORITHMS, SCALED_MUON.name, SCALED_MUON)


@pytest.mark.usefixtures("registered")
def test_the_use_on_the_page_routes_matrices_to_the_algorithm_and_the_rest_to_adamw():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    # --8<-- [start:use]
    ALGORITHMS["scaled_muon"] = SCALED_MUON
    optimizer = dmuon.Muon(dmuon.param_groups(model), lr=0.02, algorithm="scaled_muon")
    # --8<-- [end:use]
    assert [group["algorithm"] for group in optimizer.param_groups] == ["scaled_muon", "adamw"]
    assert optimizer.param_groups[0]["beta2"] == 0.99
    state = optimizer.state_dict()["state"]
    assert {*state[0]} == {"momentum_buffer", "second_moment"}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_algorithm_of_the_page_is_its_formula(shape):
    weight = nn.Parameter(seeded(shape, 0).double())
    W, B, V = weight.detach().clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    group = {"params": [weight], "algorithm": "scaled_muon", "beta2": 0.9}
    optimizer = dmuon.Muon([group], lr=LR, ns_dtype=torch.float64)
    for step in range(3):
        G = weight.grad = seeded(shape, 1, step).double()
        optimizer.step()
        B = 0.95 * B + 0.05 * G
        V = 0.9 * V + 0.1 * G**2
        O = orthogonalize(B / (V.sqrt() + 1e-8), coefficients="original", steps=5)  # noqa: E741
        O = O / O.square().mean().sqrt()  # noqa: E741
        W = W * (1 - LR * 0.1) - LR * lr_scale(None, shape) * O
    torch.testing.assert_close(weight.detach(), W, rtol=0, atol=1e-12)


def parity_of_the_page(specs):
    """Rank body: the layouts of `specs` against whole parameters."""
    ALGORITHMS[SCALED_MUON.name] = SCALED_MUON
    try:
        return run_parity(specs, muon={"algorithm": "scaled_muon", "bucket_cap_mb": 1e-4})
    finally:
        del ALGORITHMS[SCALED_MUON.name]


def test_algorithm_of_the_page_gives_the_weights_of_one_process(run_ranks):
    check(run_ranks(2, parity_of_the_page, fsdp_specs(2, (9, 8), (5, 7), (8, 16), (1, 8))))
