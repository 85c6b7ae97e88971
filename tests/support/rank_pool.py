"""Gloo ranks that live for a whole pytest session, so that a distributed test costs milliseconds.

A rank body is a module-level function of a test module. It runs once in each rank, with the default
process group initialised, one thread, seed 0 and the warning filters of the calling test. What it
returns is pickled and comes back in the order of the ranks.
"""

import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

START_TIMEOUT_S = 90.0
# A collective that a peer never joins raises, before the default timeout of a call ends the rank.
COLLECTIVE_TIMEOUT = timedelta(seconds=20)
# After a first failure, how long the other ranks may still take to report theirs.
GRACE_S = 1.0
# Imported once, in the server that the ranks are forked from. `fully_shard` imports `torch._dynamo`
# at its first call, which would cost seconds in every rank.
PRELOAD = ["pytest", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]


class RankError(AssertionError):
    """A rank raised, died, or did not finish in time; the message holds the tracebacks."""


@dataclass(frozen=True)
class Job:
    """One call of a body, as it is sent to every rank."""

    body: Callable[..., Any]
    args: tuple[Any, ...]
    timeout: float
    warning_filters: list[Any]


@dataclass(frozen=True)
class Outcome:
    """What one rank's body returned, or the traceback of what it raised."""

    result: Any = None
    error: str | None = None


class RankPool:
    """`world_size` processes in one gloo group; thrown away after the first failure."""

    def __init__(self, world_size: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._dir = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (rank, world_size, self._dir.name, theirs)
            process = context.Process(target=_rank_main, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._collect(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def run(self, body: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """Return the results of `body(*args)` by rank.

        Raises:
            RankError: a rank raised, died, or took longer than `timeout` seconds.
        """
        # Not `Connection.send`: torch makes it share a tensor's memory, which a killed rank breaks.
        job = pickle.dumps(Job(body, args, timeout, list(warnings.filters)))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        # The rank's own watchdog comes first and leaves a stack; this one is for when it cannot.
        return self._collect(timeout + 5.0)

    def close(self) -> None:
        """Kill the ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._dir.cleanup()

    def _collect(self, timeout: float) -> list[Any]:
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(self._pipes):
            waiting = {p: r for r, p in enumerate(self._pipes) if r not in outcomes}
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if any(o.error for o in outcomes.values()) or len(outcomes) < len(self._pipes):
            raise RankError(self._describe(outcomes))
        return [outcomes[rank].result for rank in range(len(self._pipes))]

    def _receive(self, rank: int) -> Outcome:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return Outcome(error=f"died\n{_stack_file(self._dir.name, rank).read_text()}")

    def _describe(self, outcomes: dict[int, Outcome]) -> str:
        lines = []
        for rank in range(len(self._pipes)):
            if rank not in outcomes:
                lines.append(f"--- rank {rank}: no answer")
            elif outcomes[rank].error is not None:
                lines.append(f"--- rank {rank}: {outcomes[rank].error}")
        return "\n".join(["", *lines])


def _rank_main(
    rank: int, world_size: int, directory: str, pipe: multiprocessing.connection.Connection
) -> None:
    stack_file = _stack_file(directory, rank).open("w")
    faulthandler.enable(stack_file)
    torch.set_num_threads(1)
    # A mesh makes groups, each with threads; thousands of threads slow a long session down.
    device_mesh.init_device_mesh = functools.lru_cache(device_mesh.init_device_mesh)
    store = dist.FileStore(str(Path(directory) / "store"), world_size)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, store=store, timeout=COLLECTIVE_TIMEOUT
    )
    pipe.send_bytes(pickle.dumps(Outcome()))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_run_job(message, stack_file))


def _run_job(message: bytes, stack_file: Any) -> bytes:
    """Return a job's pickled outcome; a job that hangs ends the process, its stack in the file."""
    try:
        job = pickle.loads(message)
        faulthandler.dump_traceback_later(job.timeout, exit=True, file=stack_file)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.filters[:] = job.warning_filters
            return pickle.dumps(Outcome(result=job.body(*job.args)))
    except BaseException as error:  # noqa: BLE001 - pytest.fail and SystemExit are failures of the body too
        return pickle.dumps(Outcome(error=_format(error)))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _format(error: BaseException) -> str:
    return f"raised {type(error).__name__}\n{''.join(traceback.format_exception(error))}"


def _stack_file(directory: str, rank: int) -> Path:
    return Path(directory) / f"stack-{rank}.txt"
