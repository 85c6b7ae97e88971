"""The parameter's device, dtype and layout decide about its state, at every step."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from tests.support.faults import LR, assert_near, laid_out_like, local
from tests.support.parity import full_tensor, seeded

BFLOAT16 = torch.bfloat16


class Pair(nn.Module):
    """Two matrices and two vectors."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def fill(self):
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(laid_out_like(seeded(tuple(p.shape), 4, i).to(p.dtype), p))
        return self


def optimizer_of(model, **options):
    named = [*model.named_parameters()]
    groups = [
        {"params": [(n, p) for n, p in named if p.ndim > 1]},
        {"params": [(n, p) for n, p in named if p.ndim == 1], "algorithm": "adamw", "lr": 0.01},
    ]
    return dmuon.Muon(groups, lr=LR, **options)


def train(model, optimizer, steps):
    for step in steps:
        for i, p in enumerate(model.parameters()):
            p.grad = laid_out_like(seeded(tuple(p.shape), 11, step, i).to(p.dtype), p)
        optimizer.step()
    optimizer.zero_grad()


def weights(model):
    return {n: full_tensor(p).clone() for n, p in model.named_parameters()}


@contextlib.contextmanager
def swapping():
    """Module conversions keep parameters themselves, as they always do for DTensors."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def make(sharded, device="cpu"):
    with torch.device(device):
        model = Pair()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def from_meta(sharded, master_weights=False):
    """Made on meta, optimizer, `to_empty`: as one that was there from the start."""
    model, expected = make(sharded, "meta"), make(sharded).fill()
    if master_weights:
        model.to(BFLOAT16)
        expected.to(BFLOAT16)
    optimizer = optimizer_of(model, master_weights=master_weights)
    model.to_empty(device="cpu")
    model.fill()
    reference = optimizer_of(expected, master_weights=master_weights)
    for each, of in ((model, optimizer), (expected, reference)):
        train(each, of, range(2))
        assert all(not local(t).is_meta for s in of.state.values() for t in s.values())
    assert_near(weights(model), weights(expected), tolerance=0)


def saved_and_loaded(sharded):
    """Saved while on meta, as launchers do that ask for a template first."""
    model = make(sharded, "meta")
    optimizer = optimizer_of(model)
    assert len(optimizer.state_dict()["state"]) == 4
    source = make(sharded).fill()
    saved = optimizer_of(source)
    train(source, saved, range(2))
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    for each, of in ((model, optimizer), (source, saved)):
        train(each, of, [2])
    assert_near(weights(model), weights(source), tolerance=0)


def cast_and_back(sharded):
    """float32, bfloat16 and float32 again: trains on, with momentum that was kept."""
    model, expected = make(sharded).fill(), make(sharded).fill()
    optimizer, reference = optimizer_of(model), optimizer_of(expected)
    for each, of in ((model, optimizer), (expected, reference)):
        train(each, of, range(2))
    model.to(BFLOAT16)
    before = weights(model)
    train(model, optimizer, [2])
    after = weights(model)
    assert all(after[n].dtype == BFLOAT16 for n in after)
    assert not any(torch.equal(after[n], before[n]) for n in after)
    model.to(torch.float32)
    train(expected, reference, [2])
    train(model, optimizer, [3])
    train(expected, reference, [3])
    found, wanted = weights(model), weights(expected)
    for name in found:
        assert found[name].dtype == torch.float32
        # Weights were rounded to bfloat16, and so was one gradient.
        torch.testing.assert_close(found[name], wanted[name], rtol=2**-7, atol=LR)


def doubled(sharded):
    model, expected = make(sharded).fill(), make(sharded).fill()
    optimizer, reference = optimizer_of(model), optimizer_of(expected)
    for each, of in ((model, optimizer), (expected, reference)):
        train(each, of, range(2))
    model.double()
    train(model, optimizer, [2, 3])
    train(expected, reference, [2, 3])
    found = {n: w.float() for n, w in weights(model).items()}
    assert_near(found, weights(expected), tolerance=1e-3)


def masters_made_late(sharded):
    """master_weights=True, and only then bfloat16: masters are made, and every weight moves."""
    model = make(sharded).fill()
    optimizer = optimizer_of(model, master_weights=True)
    model.to(BFLOAT16)
    expected = make(sharded).fill().to(BFLOAT16)
    reference = optimizer_of(expected, master_weights=True)
    for each, of in ((model, optimizer), (expected, reference)):
        train(each, of, range(3))
        state = of.state[next(each.parameters())]
        assert state["master_weight"].dtype == state["momentum_buffer"].dtype == torch.float32
    assert_near(weights(model), weights(expected), tolerance=0)


def masters_left(sharded):
    """bfloat16 with masters, then float32: the parameter itself is trained again."""
    model = make(sharded).fill().to(BFLOAT16)
    optimizer = optimizer_of(model, master_weights=True)
    train(model, optimizer, range(2))
    model.float()
    before = weights(model)
    train(model, optimizer, [2])
    after = weights(model)
    assert not any(torch.equal(after[n], before[n]) for n in after)
    assert all("master_weight" not in state for state in optimizer.state.values())


def widened(sharded):
    """bfloat16 at first: float32 weights must not be left with the momentum of bfloat16."""
    model = make(sharded).fill().to(BFLOAT16)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    model.float()
    expected = make(sharded)
    with torch.no_grad():
        for p, q in zip(expected.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    reference = optimizer_of(expected)
    for p, q in zip(expected.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[q].items():
            reference.state[p][key].copy_(value)
    for each, of in ((model, optimizer), (expected, reference)):
        train(each, of, range(2, 5))
    assert_near(weights(model), weights(expected), tolerance=0)


def moved_by_hand(sharded):
    """State that a user offloads, and brings back or does not, between two steps."""
    model, expected = make(sharded).fill(), make(sharded).fill()
    optimizer, reference = optimizer_of(model), optimizer_of(expected)
    for each, of in ((model, optimizer), (expected, reference)):
        train(each, of, range(2))
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.to(torch.float64).to(value.dtype)  # another tensor
    for each, of in ((model, optimizer), (expected, reference)):
        train(each, of, [2])
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step":
                state[key] = value.to("meta")
    before = weights(model)
    train(model, optimizer, [3])
    assert not any(torch.equal(w, before[n]) for n, w in weights(model).items())


def loaded_into_moved(sharded):
    """A checkpoint of float32 into a model that has been cast, and the other way."""
    source = make(sharded).fill()
    saved = optimizer_of(source)
    train(source, saved, range(2))
    state = copy.deepcopy(saved.state_dict())
    model = make(sharded).fill()
    optimizer = optimizer_of(model)
    model.double()
    model.load_state_dict(source.state_dict())
    optimizer.load_state_dict(state)
    for values in optimizer.state.values():
        assert {v.dtype for k, v in values.items() if k != "step"} == {torch.float64}
    train(model, optimizer, [2])
    train(source, saved, [2])
    found = {n: w.float() for n, w in weights(model).items()}
    assert_near(found, weights(source), tolerance=1e-3)


BODIES = [
    from_meta,
    saved_and_loaded,
    cast_and_back,
    doubled,
    masters_made_late,
    masters_left,
    widened,
    moved_by_hand,
    loaded_into_moved,
]


@pytest.mark.parametrize("body", BODIES)
def test_state_follows_its_parameter_on_one_process(body):
    with swapping():
        body(sharded=False)


@pytest.mark.parametrize("body", BODIES)
def test_state_follows_its_parameter_on_two_ranks(run_ranks, body):
    run_ranks(2, body, True)


@pytest.mark.parametrize("sharded", [False, True])
def test_masters_are_made_for_a_model_from_meta(run_ranks, sharded):
    if sharded:
        run_ranks(2, from_meta, True, True)
    else:
        with swapping():
            from_meta(sharded=False, master_weights=True)
