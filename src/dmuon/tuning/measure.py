"""Checks every way to orthogonalize a batch against float64, times it, and keeps the fastest."""

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dmuon.newton_schulz import Method, exact_arithmetic, orthogonalize_stack
from dmuon.newton_schulz.backend import BACKENDS, PLAIN, Backend
from dmuon.newton_schulz.choice import obstacle
from dmuon.plan.batches import resolve_backend
from dmuon.plan.cost import Choice, Shape, Timings, newton_schulz_flops
from dmuon.tuning.table import load, save

_LOG = logging.getLogger("dmuon")
# Twice the worst relative errors of half precision in Gram form, and float32's with room.
_TOLERANCES = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-3, torch.float64: 1e-9}
# Short runs are repeated, and the least time counts.
_REPEATS, _ENOUGH_MS = 10, 30.0


@dataclass(frozen=True, slots=True)
class BatchKind:
    """Matrices that a plan orthogonalizes in one call.

    Attributes:
        method: What is computed.
        batch: Number of matrices.
        shape: Of each, smaller side first.
    """

    method: Method
    batch: int
    shape: Shape

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """As `Choice.key`."""
        return (self.method.dtype_name, self.batch, *self.shape, self.method.steps)

    def __str__(self) -> str:
        return f"{self.batch} x {self.shape[0]} x {self.shape[1]} in {self.method.dtype_name}"


def timings_allowed() -> bool:
    """Return whether plans may follow measured times: not in torch's deterministic mode."""
    return not torch.are_deterministic_algorithms_enabled()


def measure(
    kinds: Iterable[BatchKind],
    device: torch.device,
    *,
    budget_s: float = 20.0,
    cache: Path | None = None,
) -> Timings:
    """Return the fastest correct way to orthogonalize each kind of batch on a device.

    Every backend without `obstacle` is compared with float64 and then timed; one that is wrong or
    fails is left out. The kinds with the most FLOPs come first, and what the budget does not cover
    is left to `choose_backend`. Progress is logged to "dmuon" at INFO. Without `timings_allowed`
    nothing is measured or read.

    Args:
        kinds: What a plan calls.
        device: Where.
        budget_s: Seconds after which no further backend is tried.
        cache: File of what was measured before, which is followed and to which the rest is added;
            one that cannot be read is replaced. See `table.default_path`.

    Returns:
        Choices for `kinds` alone. The caller shares them with the other ranks of its job.

    Warns:
        UserWarning: A backend failed although it should run there; or `cache` cannot be written.
    """
    if not timings_allowed():
        return Timings()
    by_cost = sorted(kinds, key=lambda kind: -kind.batch * newton_schulz_flops(kind.shape, 1))
    wanted = {kind.key: kind for kind in by_cost}
    known = {choice.key: choice for choice in _read(cache).choices}
    missing = [kind for key, kind in wanted.items() if key not in known]
    known |= {choice.key: choice for choice in _measured(missing, device, budget_s)}
    if cache is not None and missing:
        try:
            save(cache, Timings(tuple(known.values())))
        except OSError as error:
            warnings.warn(f"the tuning cache was not written: {error}", stacklevel=2)
    return Timings(tuple(known[key] for key in wanted if key in known))


def _measured(kinds: list[BatchKind], device: torch.device, budget_s: float) -> Iterator[Choice]:
    """Yield the fastest choice of each kind for which there was time, and log the progress."""
    start = time.monotonic()
    for number, kind in enumerate(kinds, 1):
        choice = _fastest(kind, device, start + budget_s)
        found = "not measured"
        if choice is not None:
            found = f"{choice.backend}, {choice.milliseconds:.3f} ms"
            yield choice
        progress = f"{number} of {len(kinds)}, {time.monotonic() - start:.1f} of {budget_s:.0f} s"
        _LOG.info("tuning %s: %s: %s", progress, kind, found)


def _read(cache: Path | None) -> Timings:
    try:
        return load(cache) if cache is not None and cache.exists() else Timings()
    except ValueError as error:
        _LOG.info("%s", error)
        return Timings()


def _fastest(kind: BatchKind, device: torch.device, deadline: float) -> Choice | None:
    """Return the best of what can run a kind, tried until `deadline`; None if nothing is right."""
    method, times = kind.method, dict[Backend, float]()
    default, parts = resolve_backend(method, Timings(), kind.batch, kind.shape, device)
    # What would run without timings comes first: the others must beat it.
    for backend in sorted(BACKENDS, key=lambda backend: backend != default):
        if time.monotonic() >= deadline:
            break
        if obstacle(backend, method.coefficients, device, method.dtype) is None:
            try:
                milliseconds = _milliseconds(kind, device, backend, parts)
            except Exception as error:  # noqa: BLE001 - another package's kernel may fail in any way
                warnings.warn(f"{backend} was left out: {error!r}", stacklevel=3)
                continue
            if milliseconds is not None:
                times[backend] = milliseconds
    if not times:
        return None
    best = min(times, key=times.__getitem__)
    return Choice(*kind.key, best, parts, times[best])


@torch.no_grad()
def _milliseconds(
    kind: BatchKind, device: torch.device, backend: Backend, parts: int
) -> float | None:
    """Return the time of a backend on random matrices; None if it is off from float64."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (kind.batch, *kind.shape)
    x_BMN = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    x_BMN = x_BMN.to(kind.method.dtype)
    exact = replace(kind.method, dtype=torch.float64)
    run = partial(orthogonalize_stack, x_BMN, kind.method, backend, parts)
    # The first and the last matrix stand for all.
    ends = slice(None, None, max(1, kind.batch - 1))
    with exact_arithmetic(device.type):
        expected = orthogonalize_stack(x_BMN[ends].double(), exact, PLAIN)
        error = (run()[ends] - expected).norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))
        right = bool((error <= _TOLERANCES[kind.method.dtype]).all())
        return _least_milliseconds(run, device) if right else None


def _least_milliseconds(run: Callable[[], Tensor], device: torch.device) -> float:
    """Return the least time of some runs, of which the first took place before."""
    times: list[float] = []
    while not times or (len(times) < _REPEATS and sum(times) < _ENOUGH_MS):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
