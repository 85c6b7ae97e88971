"""Models under `fully_shard` and DDP: made on meta, with their own data, in lower precision."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import dmuon
from tests.support.parity import (
    LR,
    full_tensor,
    seeded,
)
from tests.support.wrapped import Tiny, backward, batch_of, seeded_tiny, shard_tiny, weights_of

BFLOAT16 = torch.bfloat16


def test_r08_model_built_on_meta_orthogonalizes_every_matrix_and_all_weights_move(run_ranks):
    results = run_ranks(2, meta_body)
    assert [num_matrices for num_matrices, _, _ in results] == [2, 2]
    assert sum(orthogonalized for _, orthogonalized, _ in results) == 2
    assert [unmoved for _, _, unmoved in results] == [[], []]


def meta_body():
    with torch.device("meta"):
        model = shard_tiny(Tiny())
    model.to_empty(device="cpu")
    for i, p in enumerate(model.parameters()):
        shard = p.to_local()
        shard.detach().copy_(seeded(shard.shape, i))
    optimizer = dmuon.Muon(dmuon.param_groups(model), lr=LR)
    before = weights_of(model)
    backward(model, [dist.get_rank()], 0)
    optimizer.step()
    after = weights_of(model)
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    return optimizer.report().num_matrices, optimizer.stats.ns_matrices, unmoved


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("wrapper", ["ddp", "ddp, sharded state", "fsdp2"])
def test_r18_owners_see_the_gradient_averaged_over_all_data(run_ranks, wrapper, world_size):
    weights = run_ranks(world_size, different_data_body, wrapper)
    # Different sums round gradients differently, and Newton-Schulz magnifies the smallest
    # singular values about 500 times: 1e-4 of a step, where a rank's own data would give 1.
    expected = one_process_weights(world_size)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[0][name], weight, rtol=0, atol=1e-4 * LR, msg=name)
        for other in weights[1:]:
            assert torch.equal(other[name], weights[0][name])
    own_data = one_process_weights(1)
    assert (own_data["layers.1.weight"] - expected["layers.1.weight"]).abs().max() > 0.1 * LR


def one_process_weights(num_batches):
    model = seeded_tiny()
    optimizer = dmuon.Muon(dmuon.param_groups(model), lr=LR)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, range(num_batches), step)
        optimizer.step()
    return weights_of(model)


def different_data_body(wrapper):
    model: nn.Module = seeded_tiny()
    options = {}
    if wrapper == "fsdp2":
        model = shard_tiny(model)
    else:
        model = DistributedDataParallel(model)
        options["process_group"] = dist.group.WORLD
        options["shard_state"] = wrapper == "ddp, sharded state"
    optimizer = dmuon.Muon(dmuon.param_groups(model), lr=LR, **options)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, [dist.get_rank()], step)
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("policy", ["mixed precision", "bfloat16", "both dtypes"])
def test_fsdp2_in_lower_precision_equals_one_process_with_the_same_gradients(run_ranks, policy):
    for errors, sharded, whole in run_ranks(2, precision_body, policy):
        assert sharded == whole
        for name, (error, dtype) in errors.items():
            # A weight in bfloat16 may round the other way, by one unit in the last place.
            assert error <= (1e-5 * LR if dtype == torch.float32 else 2**-8), name


def precision_body(policy):
    model = seeded_tiny()
    if policy == "bfloat16":
        model.to(BFLOAT16)
    elif policy == "both dtypes":
        model.layers[1].to(BFLOAT16)
    whole = copy.deepcopy(model)
    mp_policy = MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=torch.float32)
    options = {} if policy == "bfloat16" else {"mp_policy": mp_policy}
    shard_tiny(model, **options)
    optimizer = dmuon.Muon(dmuon.param_groups(model), lr=LR)
    reference = dmuon.Muon(dmuon.param_groups(whole), lr=LR)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch_of(dist.get_rank(), step)
        nn.functional.mse_loss(model(inputs.to(BFLOAT16)), targets.to(BFLOAT16)).backward()
        for p, w in zip(model.parameters(), whole.parameters(), strict=True):
            w.grad = full_tensor(p.grad).clone()
        optimizer.step()
        reference.step()
    names = dict(whole.named_parameters())
    errors = {
        name: ((weight.float() - names[name].detach().float()).abs().max().item(), weight.dtype)
        for name, weight in weights_of(model).items()
    }
    dtypes = [
        {
            name: str(opt.state[p]["momentum_buffer"].dtype)
            for name, p in m.named_parameters()
            if "momentum_buffer" in opt.state[p]
        }
        for m, opt in ((model, optimizer), (whole, reference))
    ]
    return errors, *dtypes
