"""No setting of the surroundings reaches a step: the same bits as without."""

import contextlib

import pytest
import torch

import dmuon
from tests.newton_schulz.test_ambient import SURROUNDINGS
from tests.support.faults import Job, same


@contextlib.contextmanager
def autocast_and_inference():
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        yield


ALL = {**SURROUNDINGS, "grad": torch.enable_grad, "both": autocast_and_inference}
OPTIONS = {
    "default": {},
    "skip": {"nonfinite": "skip"},
    "masters": {"master_weights": True},
    "normuon": {"algorithm": "normuon"},
    "list": {"ns_coefficients": "polar_express"},
}


def train(around, distributed, options):
    """Construction, a clip and three steps inside; a thawed parameter's state is made there too."""
    job = Job.make(distributed=distributed, **options)
    if options.get("master_weights"):
        for p in job.params.values():
            p.data = p.data.to(torch.bfloat16)
    for step in range(3):
        job.params["frozen"].requires_grad_(step > 0)
        job.set_grads(step)
        with around():
            dmuon.clip_grad_norm_(job.optimizer, 3.0)
            job.optimizer.step()
    return job.numbers()


def compare(name, distributed, options):
    found, expected = (
        train(around, distributed, options) for around in (ALL[name], contextlib.nullcontext)
    )
    assert found.keys() == expected.keys()
    assert same(found, expected)
    kinds = [{k: (t.dtype, t.device) for k, t in side.items()} for side in (found, expected)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ALL)
def test_a_step_has_the_same_bits_in_any_surroundings(name, options):
    # In autocast, Newton-Schulz ran in bfloat16.
    compare(name, distributed=False, options=options)


@pytest.mark.parametrize("name", ALL)
def test_a_step_of_two_ranks_has_the_same_bits_in_any_surroundings(run_ranks, name):
    for options in (OPTIONS["skip"], OPTIONS["normuon"]):
        run_ranks(2, compare, name, True, options)
