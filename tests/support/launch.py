"""How a rank of the pool looks to a trainer that expects to be started by torchrun."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist

import dmuon


def needs(library: str) -> pytest.MarkDecorator:
    """Skip a test where a library is missing; nothing is imported here."""
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"{library} is not installed")


@contextlib.contextmanager
def torchrun_environment() -> Iterator[None]:
    """Set the variables of torchrun; the process group exists already, so no address is used."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {
        **{key: rank for key in ("RANK", "LOCAL_RANK", "GROUP_RANK")},
        **{key: world_size for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "pool",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with mock.patch.dict(os.environ, variables):
        yield


@contextlib.contextmanager
def recorded_optimizers() -> Iterator[list[dmuon.Muon]]:
    """Collect every `dmuon.Muon` that is made, to see that the trainer's own steps reach it."""
    made = []
    init = dmuon.Muon.__init__

    def record(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(self)

    with mock.patch.object(dmuon.Muon, "__init__", record):
        yield made
