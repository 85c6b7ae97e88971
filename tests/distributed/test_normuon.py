"""NorMuon on ranks: its rows travel with their matrix, and its numbers are those of one process."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dmuon
from tests.support.layout_cases import CASES, run_case
from tests.support.parity import LR, Spec, check, fsdp_specs, full_tensor, parity_body, seeded

ROWS = "second_moment_rows"
NORMUON = {"algorithm": "normuon"}


# The small bound puts every matrix in a bucket of its own, so that buckets overlap.
@pytest.mark.parametrize("bucket_cap_mb", [64.0, 1e-5], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_update_and_rows_are_the_same_on_every_layout(run_ranks, case, bucket_cap_mb):
    muon = {**case.muon, **NORMUON, "bucket_cap_mb": bucket_cap_mb}
    check(run_ranks(case.world_size, run_case, replace(case, muon=muon)))


@pytest.mark.parametrize("name", ["HSDP 2x2", "HSDP, Shard(1)", "HSDP, experts"])
def test_repeated_ns_gives_the_same_weights_and_rows(run_ranks, name):
    (case,) = [case for case in CASES if case.name == name]
    muon = {**NORMUON, "repeat_ns": True}
    check(run_ranks(4, run_case, replace(case, muon=muon)), runs_per_matrix=2)


def test_rows_are_counted_in_the_bytes_of_the_plan(run_ranks):
    specs = fsdp_specs(2, (8, 6))
    planned = []
    for muon in ({}, NORMUON):
        outcomes = run_ranks(2, parity_body, specs, muon)
        check(outcomes)
        planned.append([outcome.bytes_sent for outcome in outcomes])
    # Half of the matrix goes to the owner and half comes back, and so do 4 rows in float32.
    assert planned == [[4 * 6 * 4] * 2, [4 * (6 + 1) * 4] * 2]


HALF = {
    "FSDP2": fsdp_specs(2, (6, 4), (4, 6), (5, 3), (1, 4)),
    "row-parallel": [Spec((6, 4), (2,), (Shard(1),)), Spec((4, 6), (2,), (Shard(1),))],
    "experts": [Spec((3, 5, 4), (2,), (Shard(1),))],
    "columns split": [Spec((4, 6), (2,), (Shard(0),), options={"split": ((2, 4), 1)})],
    "half-precision weights": fsdp_specs(2, (6, 4), (4, 6), dtype=torch.bfloat16),
}


def exact_rows(specs, wire):
    """Whether the rows keep every bit on the way to the owner and back, and are stored in float32.

    With beta2 of nearly 1 they stay what they were, but for less than a float32 can say.
    """
    mesh = init_device_mesh("cpu", (2,))
    groups, weights = [], []
    for i, spec in enumerate(specs):
        values = seeded(spec.shape, i).to(spec.dtype)
        values = distribute_tensor(values, mesh, spec.placements, src_data_rank=None)
        weights.append(nn.Parameter(values))
        groups.append({"params": weights[-1:], "beta2": 1 - 1e-12, **spec.options})
    optimizer = dmuon.Muon(groups, lr=LR, ns_dtype=wire, **NORMUON)
    before = []
    for i, weight in enumerate(weights):
        rows = optimizer.state[weight][ROWS]
        values = seeded(tuple(rows.shape), 7, i).abs().add_(0.1)
        rows.copy_(distribute_tensor(values, mesh, rows.placements, src_data_rank=None))
        before.append(values)
        grad = seeded(tuple(weight.shape), 8, i).to(weight.dtype)
        weight.grad = distribute_tensor(grad, mesh, weight.placements, src_data_rank=None)
    optimizer.step()
    for weight, values in zip(weights, before, strict=True):
        rows = optimizer.state[weight][ROWS]
        assert rows.dtype == torch.float32
        assert torch.equal(full_tensor(rows), values)
        assert full_tensor(weight).isfinite().all()
    return optimizer.stats.bytes_sent, optimizer.report().bytes_sent


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("layout", HALF)
def test_rows_keep_float32_precision_on_any_wire(run_ranks, layout, wire):
    for rank, (sent, planned) in enumerate(run_ranks(2, exact_rows, HALF[layout], wire)):
        assert sent == planned[rank] > 0


@pytest.mark.parametrize("layout", HALF)
def test_a_half_precision_wire_gives_what_one_process_gives(run_ranks, layout):
    muon = {**NORMUON, "ns_dtype": torch.bfloat16}
    # Batches of other sizes may round otherwise: 2^-8 of the largest entries.
    outcomes = run_ranks(2, parity_body, HALF[layout], muon)
    check(outcomes, tolerance=3e-2)


def some_missing():
    """Rank 1 has no gradient for the first weight, and no rank has one for the second."""
    mesh = init_device_mesh("cpu", (2,))
    weights, wholes = [], []
    for i in range(3):
        values = seeded((6, 4), i)
        wholes.append(nn.Parameter(values.clone()))
        laid_out = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)
        weights.append(nn.Parameter(laid_out))
    optimizer, reference = (dmuon.Muon(p, lr=LR, **NORMUON) for p in (weights, wholes))
    for i in (0, 2):
        grad = seeded((6, 4), 9, i)
        if i == 0:
            grad[3:] = 0
        wholes[i].grad = grad
        if i == 2 or mesh.get_rank() == 0:
            weights[i].grad = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
    optimizer.step()
    reference.step()
    for weight, whole in zip(weights, wholes, strict=True):
        torch.testing.assert_close(full_tensor(weight), whole.detach(), rtol=0, atol=1e-5 * LR)
        rows, expected = optimizer.state[weight][ROWS], reference.state[whole][ROWS]
        torch.testing.assert_close(full_tensor(rows), expected, rtol=1e-5, atol=0)
    assert not full_tensor(optimizer.state[weights[1]][ROWS]).any()


def test_missing_gradients_count_as_zeros_or_leave_rows_alone(run_ranks):
    run_ranks(2, some_missing)


def mixed():
    """Muon, NorMuon with two values of beta2, and AdamW, in one optimizer, against one process."""
    mesh = init_device_mesh("cpu", (2,))
    options = [
        {"algorithm": "muon"},
        {"algorithm": "normuon"},
        {"algorithm": "normuon", "beta2": 0.5},
        {"algorithm": "adamw"},
    ]
    shapes = [(6, 4), (4, 6), (6, 4)]
    sides = []
    for is_whole in (True, False):
        groups = []
        for number, option in enumerate(options):
            values = [seeded(shape, number, i) for i, shape in enumerate(shapes)]
            if not is_whole:
                values = [
                    distribute_tensor(v, mesh, [Shard(0)], src_data_rank=None) for v in values
                ]
            named = [(f"p{number}.{i}", nn.Parameter(v)) for i, v in enumerate(values)]
            groups.append({"params": named, **option})
        sides.append(dmuon.Muon(groups, lr=LR))
    reference, optimizer = sides
    for step in range(3):
        for side in sides:
            for i, param in enumerate(p for group in side.param_groups for p in group["params"]):
                grad = seeded(tuple(param.shape), 50, step, i)
                if side is optimizer:
                    grad = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
                param.grad = grad
            side.step()
    for a, b in zip(optimizer.param_groups, reference.param_groups, strict=True):
        for p, w in zip(a["params"], b["params"], strict=True):
            torch.testing.assert_close(full_tensor(p), w.detach(), rtol=0, atol=1e-5 * LR)
    return optimizer.stats.num_collectives


def test_algorithms_share_one_optimizer_and_its_exchanges(run_ranks):
    assert run_ranks(2, mixed) == [2, 2]


def disagree():
    mesh = init_device_mesh("cpu", (2,))
    values = distribute_tensor(seeded((6, 4), 0), mesh, [Shard(0)], src_data_rank=None)
    weight = nn.Parameter(values)
    group = {"params": [("weight", weight)], "beta2": (0.9, 0.95)[mesh.get_rank()]}
    optimizer = dmuon.Muon([group], lr=LR, **NORMUON)
    weight.grad = distribute_tensor(seeded((6, 4), 1), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


def test_ranks_that_disagree_about_beta2_are_told(run_ranks):
    first, second = run_ranks(2, disagree)
    assert first == second
    assert "weight" in first
    assert "0.9" in first
    assert "0.95" in first


def rows_layout():
    """Rows lie where the rows of the weight lie, replicated where it is cut along columns."""
    mesh = init_device_mesh("cpu", (2, 2))
    found = {}
    for name, shape, placements, options in (
        ("rows", (6, 4), (Replicate(), Shard(0)), {}),
        ("columns", (6, 4), (Shard(1), Shard(0)), {}),
        ("experts", (4, 6, 5), (Shard(0), Shard(2)), {}),
        ("convolution", (6, 4, 3), (Shard(0), Shard(1)), {"flatten": True}),
        ("blocks", (6, 9), (Shard(0), Shard(1)), {"split": ((3, 3, 3), 1)}),
    ):
        values = distribute_tensor(seeded(shape, 0), mesh, placements, src_data_rank=None)
        weight = nn.Parameter(values)
        optimizer = dmuon.Muon([{"params": [weight], **options}], **NORMUON)
        rows = optimizer.state[weight][ROWS]
        found[name] = tuple(rows.shape), rows.placements
    return found


def test_rows_are_laid_out_as_the_rows_of_their_weight(run_ranks):
    R, S = Replicate(), Shard
    assert run_ranks(4, rows_layout)[0] == {
        "rows": ((6, 1), (R, S(0))),
        "columns": ((6, 1), (R, S(0))),
        "experts": ((4, 6, 1), (S(0), R)),
        "convolution": ((6, 1), (S(0), R)),
        "blocks": ((6, 3), (S(0), R)),
    }
