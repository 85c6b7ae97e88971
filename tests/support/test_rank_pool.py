import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.rank_pool import RankError


def rank_and_sum(offset):
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), total


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_collectives_work_and_results_come_back_by_rank(run_ranks, world_size):
    results = run_ranks(world_size, rank_and_sum, 1)
    assert [rank for rank, _ in results] == list(range(world_size))
    assert all(total.item() == world_size * (world_size + 1) // 2 for _, total in results)


def process_id():
    return os.getpid()


def test_ranks_are_kept_between_calls(run_ranks):
    assert run_ranks(2, process_id) == run_ranks(2, process_id)


def draw():
    return torch.rand(3)


def test_every_body_starts_from_the_same_seed(run_ranks):
    first, second = run_ranks(2, draw), run_ranks(2, draw)
    assert all(torch.equal(first[0], x) for x in first + second)


def fail_on(rank):
    answer = 41 + dist.get_rank()
    if dist.get_rank() == rank:
        assert answer == 0
    dist.barrier()


def test_a_failing_rank_shows_its_traceback_without_waiting_for_its_peers(run_ranks):
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1: raised AssertionError") as failure:
        run_ranks(2, fail_on, 1)
    assert time.monotonic() - start < 10
    assert "in fail_on" in str(failure.value)
    assert "rank 0: no answer" in str(failure.value)
    run_ranks(2, fail_on, None)


def hang_on_rank_0():
    if dist.get_rank() == 0:
        dist.barrier()


def test_a_hang_fails_within_the_timeout_and_the_next_call_gets_fresh_ranks(run_ranks):
    before = run_ranks(2, process_id)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0: died\n(.|\n)*Timeout(.|\n)*in hang_on_rank_0"):
        run_ranks(2, hang_on_rank_0, timeout=1)
    assert time.monotonic() - start < 10
    assert set(before).isdisjoint(run_ranks(2, process_id))


def exit_abruptly():
    os._exit(3)


def test_a_rank_that_dies_is_a_failure(run_ranks):
    with pytest.raises(RankError, match="rank 0: died"):
        run_ranks(1, exit_abruptly)


def warn():
    warnings.warn("careless", UserWarning, stacklevel=1)


def test_a_warning_in_a_rank_is_an_error(run_ranks):
    with pytest.raises(RankError, match="UserWarning: careless"):
        run_ranks(1, warn)


@pytest.mark.filterwarnings("ignore:careless")
def test_a_rank_follows_the_warning_filters_of_the_test(run_ranks):
    run_ranks(1, warn)


def test_a_body_that_cannot_be_sent_does_not_reach_the_ranks(run_ranks):
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        run_ranks(2, lambda: None)


def test_a_fake_world_shards_as_a_large_mesh_does_and_leaves_nothing_behind(fake_world):
    for world_size, rank, local_rows in [(64, 0, 2), (64, 49, 2), (64, 50, 0), (3, 2, 32)]:
        with fake_world(world_size, rank):
            mesh = init_device_mesh("cpu", (world_size,))
            x = distribute_tensor(torch.zeros(100, 4), mesh, [Shard(0)], src_data_rank=None)
            assert (x + x).to_local().shape == (local_rows, 4)
        assert not dist.is_initialized()
