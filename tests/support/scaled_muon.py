"""The algorithm that docs/algorithms.md writes: Muon of gradients divided by their running size."""

from dmuon.algorithms import Algorithm, Matrices, StateKind
from dmuon.algorithms.muon import HYPERPARAMETERS
from dmuon.algorithms.stages import apply_, momentum_


def advance(grads, states, group):
    """B <- mu B + (1 - mu) G;  V <- beta2 V + (1 - beta2) G^2, element by element."""
    momentum_(states["momentum_buffer"], grads, group["momentum"])
    momentum_(states["second_moment"], [grad.square() for grad in grads], group["beta2"])


def inputs(grads, states, group):
    """U = B / (sqrt(V) + 1e-8), which is orthogonalized."""
    pairs = zip(states["momentum_buffer"], states["second_moment"], strict=True)
    return [momentum / (moment.sqrt() + 1e-8) for momentum, moment in pairs]


def finish(result_BMN, states, group):
    """O <- O sqrt(M N) / |O|_F: a norm of whole matrices, which their owner has."""
    rms_B11 = result_BMN.square().mean(dim=(-2, -1), keepdim=True).sqrt()
    result_BMN.div_(rms_B11.clamp(min=1e-8))


SCALED_MUON = Algorithm(
    "scaled_muon",
    state={"momentum_buffer": StateKind.ELEMENTS, "second_moment": StateKind.ELEMENTS},
    stages=Matrices(advance, inputs, apply_, finish),
    options={"beta2": 0.99},
    hyperparameters=HYPERPARAMETERS,
)
