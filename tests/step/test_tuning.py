"""Measured choices of a whole job: measured once, by one rank, and followed by all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dmuon
from dmuon.plan.cost import Timings
from dmuon.tuning.table import load
from tests.support.parity import LR, seeded

SHAPES = [(8, 6), (6, 8), (12, 4), (5, 5)]


def train(optimizer, params, lay_out=torch.clone):
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = lay_out(seeded(tuple(p.shape), step, i))
        optimizer.step()


def whole(tuning=None, **options):
    params = [nn.Parameter(seeded(shape, 9, i)) for i, shape in enumerate(SHAPES)]
    optimizer = dmuon.Muon(params, lr=LR, tuning=tuning, **options)
    train(optimizer, params)
    return params, optimizer


def timings_of(optimizer):
    return optimizer.settings.tuning


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path))


def test_measuring_at_the_first_step_changes_no_weight_by_more_than_rounding(tmp_path):
    expected, untuned = whole()
    found, tuned = whole("measure")
    assert timings_of(untuned) == Timings()
    shapes = {(c.rows, c.columns, c.batch) for c in timings_of(tuned).choices}
    assert shapes == {(6, 8, 2), (4, 12, 1), (5, 5, 1)}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * LR)
    assert len(list(tmp_path.glob("*.json"))) == 1, "the next run need not measure"


def test_auto_measures_nothing_on_a_cpu_and_none_anywhere():
    _, auto = whole("auto")
    assert timings_of(auto) == "auto"
    _, off = whole(None)
    assert timings_of(off) == Timings()


def test_deterministic_mode_measures_nothing():
    torch.use_deterministic_algorithms(True)
    try:
        _, optimizer = whole("measure")
        assert timings_of(optimizer) == Timings()
    finally:
        torch.use_deterministic_algorithms(False)


def test_tune_writes_a_table_that_another_optimizer_follows(tmp_path):
    params, optimizer = whole()
    path = tmp_path / "table" / "mine.json"
    timings = optimizer.tune(path)
    assert timings.choices
    assert load(path) == timings == timings_of(optimizer)
    again = dmuon.Muon(params, tuning=path)
    assert timings_of(again) == timings


def measure_on_ranks(cache):
    import os

    os.environ["DMUON_CACHE_DIR"] = f"{cache}/{dist.get_rank()}"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def lay_out(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)

    params = [nn.Parameter(lay_out(seeded(shape, 9, i))) for i, shape in enumerate(SHAPES)]
    optimizer = dmuon.Muon(params, lr=LR, tuning="measure")
    train(optimizer, params, lay_out)
    return timings_of(optimizer), [p.full_tensor().detach() for p in params]


def overlap():
    """Ranks 0, 1 share one parameter and ranks 1, 2 another: no rank could decide for all."""
    rank = dist.get_rank()
    params = []
    for i, ranks in enumerate([(0, 1), (1, 2)]):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            mesh = DeviceMesh.from_group(group, "cpu")
            whole_weight = seeded((6, 4), 9, i)
            tensor = distribute_tensor(whole_weight, mesh, [Shard(0)], src_data_rank=None)
            params.append((f"p{i}", nn.Parameter(tensor)))
    optimizer = dmuon.Muon(params, lr=LR, tuning="measure")
    for _, p in params:
        p.grad = p.detach().clone()
    optimizer.step()
    return timings_of(optimizer)


def test_where_ranks_overlap_nothing_is_measured_and_nobody_waits(run_ranks):
    assert run_ranks(3, overlap) == [Timings()] * 3


def test_one_rank_measures_for_all_and_they_step_as_one_process(run_ranks, tmp_path):
    results = run_ranks(2, measure_on_ranks, str(tmp_path))
    expected, _ = whole()
    (first, weights), (second, _) = results
    assert first == second
    # What either rank owns is in the table.
    shapes = {(c.rows, c.columns) for c in first.choices}
    assert shapes == {tuple(sorted(shape)) for shape in SHAPES}
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0"], "only rank 0 measured"
    for a, b in zip(weights, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * LR)
