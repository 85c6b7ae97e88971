"""Checks every way to orthogonalize a batch against float64, times it, and keeps the fastest."""

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable
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
# In how many parts the fastest backend is tried.
_PARTS = (2, 4)


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

    @property
    def flops(self) -> int:
        """Of the plain form."""
        return self.batch * newton_schulz_flops(self.shape, self.method.steps)

    def __str__(self) -> str:
        return f"{self.batch} x {self.shape[0]} x {self.shape[1]} in {self.method.dtype_name}"


def timings_allowed() -> bool:
    """Return whether plans may follow measured times: not in torch's deterministic mode.

    There the same choices must be made in every run.
    """
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
    is not measured: `resolve_backend` then chooses by shape. In torch's deterministic mode nothing
    is measured or read. Progress is logged to "dmuon" at INFO.

    Args:
        kinds: What a plan calls.
        device: Where.
        budget_s: Seconds after which no further backend is tried.
        cache: File of what was measured before, which is followed, and to which the rest is added;
            one that cannot be read is replaced. See `table.default_path`.

    Returns:
        Choices for `kinds` alone. The caller shares them with the other ranks of its job.

    Warns:
        UserWarning: A backend failed although it should run there; or `cache` cannot be written.
    """
    if not timings_allowed():
        return Timings()
    wanted = {kind.key: kind for kind in sorted(kinds, key=lambda kind: -kind.flops)}
    known = {choice.key: choice for choice in _read(cache).choices}
    missing = [kind for key, kind in wanted.items() if key not in known]
    start = time.monotonic()
    for number, kind in enumerate(missing, 1):
        if time.monotonic() >= start + budget_s:
            _LOG.info("tuning: out of time, %d batches not measured", len(missing) - number + 1)
            break
        choice = _fastest(kind, device, start + budget_s)
        seconds = time.monotonic() - start
        progress = f"tuning {number} of {len(missing)}, {seconds:.1f} of {budget_s:.0f} s"
        if choice is None:
            _LOG.info("%s: %s: no backend is right", progress, kind)
            continue
        known[choice.key] = choice
        what = f"{choice.backend} in {choice.parts} parts, {choice.milliseconds:.3f} ms"
        _LOG.info("%s: %s: %s", progress, kind, what)
    if cache is not None and missing:
        _write(cache, Timings(tuple(known.values())))
    return Timings(tuple(known[key] for key in wanted if key in known))


def _read(cache: Path | None) -> Timings:
    if cache is None or not cache.exists():
        return Timings()
    try:
        return load(cache)
    except ValueError as error:
        _LOG.info("%s", error)
        return Timings()


def _write(cache: Path, timings: Timings) -> None:
    try:
        save(cache, timings)
    except OSError as error:
        warnings.warn(f"the tuning cache was not written: {error}", stacklevel=3)


def _fastest(kind: BatchKind, device: torch.device, deadline: float) -> Choice | None:
    """Return the best of what can run a kind, tried until `deadline`; None if nothing is right."""
    default, parts = resolve_backend(kind.method, Timings(), kind.batch, kind.shape, device)
    method = kind.method
    others = [b for b in BACKENDS if not obstacle(b, method.coefficients, device, method.dtype)]
    backends = [default, *(backend for backend in others if backend != default)]
    with torch.no_grad(), exact_arithmetic(device.type):
        trial = _Trial(kind, device)
        times = {}
        for backend in backends:
            times[backend, parts] = trial.milliseconds(backend, parts)
            if time.monotonic() >= deadline:
                break
        best = min(times, key=times.__getitem__)
        # On CPU a stack is split into what the caches hold.
        for other in {min(other, kind.batch) for other in _PARTS if device.type != "cpu"} - {parts}:
            if time.monotonic() < deadline:
                times[best[0], other] = trial.milliseconds(best[0], other)
    best = min(times, key=times.__getitem__)
    if times[best] == math.inf:
        return None
    return Choice(*kind.key, *best, times[best])


class _Trial:
    """One stack of random matrices, on which backends are tried."""

    def __init__(self, kind: BatchKind, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shape = (kind.batch, *kind.shape)
        stack_BMN = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        self._method = kind.method
        self._stack = stack_BMN.to(kind.method.dtype)
        # The first and the last matrix stand for all.
        ends = self._stack[:: max(1, kind.batch - 1)]
        self._expected = orthogonalize_stack(
            ends.double(), replace(kind.method, dtype=torch.float64), PLAIN
        )

    def milliseconds(self, backend: Backend, parts: int) -> float:
        """Return the time of a backend; infinity if it fails, or is off from float64."""
        run = partial(orthogonalize_stack, self._stack, self._method, backend, parts)
        try:
            return self._time(run) if self._is_right(run()) else math.inf
        except Exception as error:  # noqa: BLE001 - another package's kernel may fail in any way
            warnings.warn(f"{backend} was left out: {error!r}", stacklevel=2)
            return math.inf

    def _is_right(self, found_BMN: Tensor) -> bool:
        ends = found_BMN[:: max(1, len(found_BMN) - 1)].double()
        error = (ends - self._expected).norm(dim=(-2, -1)) / self._expected.norm(dim=(-2, -1))
        return bool((error <= _TOLERANCES[self._method.dtype]).all())

    def _time(self, run: Callable[[], Tensor]) -> float:
        """Return the least time of some runs, of which the first took place before."""
        times: list[float] = []
        while (len(times) < _REPEATS and sum(times) < _ENOUGH_MS) or not times:
            _synchronize(self._stack.device)
            start = time.perf_counter()
            run()
            _synchronize(self._stack.device)
            times.append((time.perf_counter() - start) * 1e3)
        return min(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
