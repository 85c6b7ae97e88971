"""Fixtures and settings that all tests share."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.rank_pool import RankPool

# The ranks of a pool share the cores with this process.
torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=25, derandomize="CI" in os.environ, database=None
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=500, database=None)
hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Return `run(world_size, body, *args, timeout=30)`: the results by rank of `body(*args)`.

    `body` is a function of a test module's top level, and runs on gloo ranks (`RankPool.run`). The
    fixture lives for the session, so that hypothesis tests can take it too.
    """
    pools: dict[int, RankPool] = {}

    def run(
        world_size: int, body: Callable[..., Any], *args: Any, timeout: float = 30
    ) -> list[Any]:
        pool = pools.pop(world_size, None) or RankPool(world_size)
        try:
            results = pool.run(body, *args, timeout=timeout)
        except BaseException:
            # Also after an interrupt the ranks may be out of step: the next call starts fresh ones.
            pool.close()
            raise
        pools[world_size] = pool
        return results

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def fake_world() -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Return `fake_world(world_size, rank=0)`, a context that makes this process one rank of many.

    There are no other ranks: its collectives return at once and move nothing.
    """

    @contextlib.contextmanager
    def enter(world_size: int, rank: int = 0) -> Iterator[None]:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()

    return enter
