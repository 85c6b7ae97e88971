"""An algorithm of a user's own: one record, and everything else follows."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import dmuon
from dmuon.algorithms import ALGORITHMS, Algorithm, Matrices, StateKind
from dmuon.algorithms.stages import apply_
from tests.distributed.test_checkpoint import load, save
from tests.support.parity import LR, seeded
from tests.support.topologies import assert_same

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)


def heavy_ball(grads, states, group):
    """B <- mu B + G, and how often each element has changed its sign."""
    for buffer, flips, grad in zip(states["buffer"], states["flips"], grads, strict=True):
        flips.add_((buffer * grad < 0).to(flips.dtype))
        buffer.mul_(group["momentum"]).add_(grad)


def signs(grads, states, group):
    """What is orthogonalized: the sign of the momentum, damped where it flips."""
    pairs = zip(states["buffer"], states["flips"], strict=True)
    return [buffer.sign() / (1 + group["damping"] * flips) for buffer, flips in pairs]


def largest(result_BMN, states, group):
    """Keep the largest entry that each row has ever had, and divide by its root."""
    top_BM1 = states["largest"]
    torch.maximum(top_BM1, result_BMN.abs().amax(-1, keepdim=True).to(top_BM1.dtype), out=top_BM1)
    result_BMN.div_(top_BM1.sqrt())


SIGNED = Algorithm(
    "signed",
    state={
        "buffer": StateKind.ELEMENTS,
        "flips": StateKind.ELEMENTS,
        "largest": StateKind.ROWS,
    },
    stages=Matrices(heavy_ball, signs, apply_, largest),
    options={"damping": 0.25},
    hyperparameters=("lr", "weight_decay", "momentum"),
)


def sign_sgd(params, grads, states, group):
    """An algorithm that works element by element."""
    for param, buffer, grad in zip(params, states["buffer"], grads, strict=True):
        buffer.mul_(group["momentum"]).add_(grad)
        param.sub_(group["lr"] * buffer.sign())


SIGN_SGD = Algorithm(
    "sign_sgd",
    state={"buffer": StateKind.ELEMENTS},
    stages=sign_sgd,
    hyperparameters=("lr", "momentum"),
)
MINE = {algorithm.name: algorithm for algorithm in (SIGNED, SIGN_SGD)}


@pytest.fixture
def registered(monkeypatch):
    for name, algorithm in MINE.items():
        monkeypatch.setitem(ALGORITHMS, name, algorithm)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tall = nn.Parameter(seeded((6, 4), 1))
        self.wide = nn.Parameter(seeded((4, 6), 2))
        self.bias = nn.Parameter(seeded((5,), 3))


def build(shard, **options):
    model = shard(Model())
    groups = [
        {"params": [("tall", model.tall), ("wide", model.wide)], "algorithm": "signed", **options},
        {"params": [("bias", model.bias)], "algorithm": "sign_sgd"},
    ]
    return model, dmuon.Muon(groups, lr=LR)


def train(model, optimizer, steps):
    for step in steps:
        for i, p in enumerate(model.parameters()):
            grad = seeded(tuple(p.shape), 10, step, i)
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = grad
        optimizer.step()


def tensors(model, optimizer):
    """Whole weights and state, by name."""
    found = dict(model.named_parameters())
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[p].items()}
    return {
        name: (t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()).clone()
        for name, t in found.items()
    }


def by_hand(steps):
    """The same in a loop, with the spectral map of `dmuon.orthogonalize`."""
    model = Model()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name: torch.zeros_like(w) for name, w in weights.items()}
    flips = {name: torch.zeros_like(w) for name, w in weights.items()}
    top = {name: torch.zeros(len(w), 1) for name, w in weights.items()}
    for step in range(steps):
        for i, (name, weight) in enumerate(weights.items()):
            grad = seeded(tuple(weight.shape), 10, step, i)
            flips[name] += (state[name] * grad < 0).float()
            state[name] = 0.95 * state[name] + grad
            if name == "bias":
                weight.sub_(LR * state[name].sign())
                continue
            damped = state[name].sign() / (1 + 0.25 * flips[name])
            ortho = dmuon.orthogonalize(damped)
            top[name] = torch.maximum(top[name], ortho.abs().amax(1, keepdim=True))
            scale = dmuon.lr_scale(None, tuple(weight.shape))
            weight.mul_(1 - LR * 0.1).sub_(LR * scale * ortho / top[name].sqrt())
    return weights


def test_a_registered_algorithm_trains_as_a_loop_does(registered):
    model, optimizer = build(lambda model: model)
    train(model, optimizer, range(4))
    for name, expected in by_hand(4).items():
        found = dict(model.named_parameters())[name].detach()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * LR)
    assert {row.algorithm for row in optimizer.report().rows} == {"signed", "sign_sgd"}
    assert optimizer.param_groups[0]["damping"] == 0.25


def test_its_options_are_checked(registered):
    with pytest.raises(ValueError, match=r"parameter group 0: damping must be in \[0, 1\)"):
        build(lambda model: model, damping=1.5)
    with pytest.warns(UserWarning, match="'dampng' is no hyperparameter.*'damping' meant"):
        build(lambda model: model, dampng=0.5)


def shard(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def train_sharded(directory):
    """Train sharded and whole, save and load, and go on."""
    with mock.patch.dict(ALGORITHMS, MINE):
        model, optimizer = build(shard)
        whole = build(lambda model: model)
        train(model, optimizer, range(3))
        train(*whole, range(3))
        found, expected = tensors(model, optimizer), tensors(*whole)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5 * LR, msg=name)
        sent = optimizer.stats.bytes_sent, sum(optimizer.report().bytes_sent.values())
        save(directory, model, optimizer)
        resumed = build(shard)
        load(directory, *resumed)
        train(model, optimizer, range(3, 5))
        train(*resumed, range(3, 5))
        assert_same(tensors(*resumed), tensors(model, optimizer))
        return sent


def test_a_registered_algorithm_trains_sharded_as_one_process_and_resumes(run_ranks, tmp_path):
    sent, planned = zip(*run_ranks(2, train_sharded, tmp_path), strict=True)
    # Half of each matrix and of its rows goes to the owner, and half comes back.
    assert sum(sent) == planned[0] == 2 * 4 * (24 + 24 + 6 + 4) // 2


def test_state_of_one_algorithm_is_not_that_of_another(registered):
    model, optimizer = build(lambda model: model)
    train(model, optimizer, range(1))
    other = dmuon.Muon(
        [{"params": [model.tall, model.wide]}, {"params": [model.bias], "use_muon": False}]
    )
    with pytest.raises(ValueError, match="parameter group 0: it was saved as signed and is muon"):
        other.load_state_dict(optimizer.state_dict())
