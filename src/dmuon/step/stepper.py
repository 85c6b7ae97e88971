"""One optimizer's steps: plan when something has changed, agree, run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dmuon.layout.local import local
from dmuon.options import check_numbers
from dmuon.plan.cost import Timings
from dmuon.plan.plan import Domain
from dmuon.state.initial import MASTER
from dmuon.state.managed import ManagedOptimizer, NamedParam
from dmuon.state.masters import refresh_, store_
from dmuon.step.bucket import Life, StepStats, bucket_life
from dmuon.step.driver import drive
from dmuon.step.nonfinite import nonfinite_param
from dmuon.step.parameters import domains_of, signature
from dmuon.step.planned import Planned
from dmuon.step.planner import make_planned
from dmuon.step.tuning import measure_together
from dmuon.transport.exchange import Exchange
from dmuon.transport.settle import settle_gradients
from dmuon.tuning.measure import timings_allowed


def eager(step: Callable[..., Any]) -> Callable[..., Any]:
    """Run `step` as it is under `torch.compile`, which would trace the planner.

    `torch.compiler.disable` as a decorator would make `import dmuon` import the compiler.
    """

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - step's own
        if torch.compiler.is_compiling():
            return torch.compiler.disable(step)(*args, **kwargs)
        return step(*args, **kwargs)

    return run


def _unknown(_: Domain) -> Any:  # noqa: ANN401 - never asked of a rank that has a problem
    raise AssertionError("a rank without a plan has a problem")


class Stepper:
    """Keeps the plan and the exchange of one optimizer.

    Args:
        optimizer: Its parameters, state and settings.
    """

    def __init__(self, optimizer: ManagedOptimizer) -> None:
        self._optimizer = optimizer
        self._exchange = Exchange()
        self._domains: list[Domain] = []
        self._planned: Planned | None = None
        self._has_trained = False

    def step(self) -> StepStats | None:
        """Take one step; None if it was skipped on all ranks.

        Collective: all ranks of each domain.
        """
        planned, absent = self._agree()
        if self._must_measure(planned):
            self.tune()
            planned, absent = self._agree()
        if self._skips(planned):
            return None
        # Last, for it may find something on some ranks only, those that no other waits for.
        self._check_any(planned, absent)
        return self._run(planned, absent)

    def plan(self) -> Planned:
        """Make the plan for the parameters as they are now; other ranks are not asked.

        Raises:
            ValueError: One of them cannot be optimized.
        """
        optimizer, rank = self._optimizer, dist.get_rank() if dist.is_initialized() else 0
        optimizer.check()
        tuning = optimizer.settings.tuning
        timings = tuning if isinstance(tuning, Timings) and timings_allowed() else Timings()
        named, state = optimizer.named_params(), optimizer.state
        return make_planned(named, state, optimizer.settings, timings, rank)

    def tune(self) -> tuple[Timings, bool]:
        """Measure the batches of the plan and follow that from now on.

        Returns:
            What was measured, and whether this rank is the one that measured.

        Collective: all ranks of each domain.
        """
        self._follow(Timings())
        planned, _ = self._agree()
        groups = self._exchange.groups
        timings, is_first = measure_together(groups, self._domains, planned)
        self._follow(timings)
        return timings, is_first

    def _follow(self, timings: Timings) -> None:
        self._optimizer.settings = replace(self._optimizer.settings, tuning=timings)
        self._planned = None

    def _must_measure(self, planned: Planned) -> bool:
        mode = self._optimizer.settings.tuning
        on_accelerator = any(p.device.type == "cuda" for p in planned.everyone)
        return mode == "measure" or (mode == "auto" and on_accelerator)

    def _agree(self) -> tuple[Planned, frozenset[str]]:
        """The plan, and the parameters without gradient anywhere, as all ranks see them."""
        problem, state = None, self._optimizer.state
        before = dict(state)
        try:
            self._renew()
        except Exception as error:  # noqa: BLE001 - every rank must hear of it
            problem, self._planned = error, None
        planned = self._planned
        try:
            absent = settle_gradients(
                self._exchange.groups,
                {
                    domain: planned.by_domain.get(domain, []) if planned else []
                    for domain in self._domains
                },
                digest=planned.digest if planned else _unknown,
                describe=planned.describe if planned else _unknown,
                problem=problem,
            )
        except BaseException:
            # Made and dropped for parameters that are refused, and may be taken back.
            state.clear()
            state.update(before)
            raise
        assert planned is not None
        return planned, absent

    def _renew(self) -> None:
        """Plan again if anything has changed that a plan depends on."""
        named, state = self._optimizer.named_params(), self._optimizer.state
        if self._planned is not None and self._is_as_planned(self._planned, named):
            return
        process_group, job = self._optimizer.settings.process_group, self._job()
        self._domains = domains_of(named, process_group)
        if job and any(not set(domain) <= set(job) for domain in self._domains):
            raise ValueError(
                f"nonfinite_group has the ranks {job}, but parameters lie on others too: on the "
                f"ranks {self._domains[-1]}; pass a group of all ranks that take a step together"
            )
        if job and job not in self._domains:
            self._domains.append(job)  # what keeps one of them from going on reaches all
        self._exchange.groups.adopt((p for _, p, _ in named), process_group)
        self._planned = self.plan()
        self._planned.signature = signature(named, state)

    def _is_as_planned(self, planned: Planned, named: list[NamedParam]) -> bool:
        try:
            for group in {id(group): group for _, _, group in named}.values():
                check_numbers(group, "")
        except ValueError:
            return False  # where all is checked they are made plain first, and named
        return planned.signature == signature(named, self._optimizer.state)

    def _check_any(self, planned: Planned, absent: frozenset[str]) -> None:
        """Refuse a step without any gradient of Muon's that follows none with one.

        An expert without tokens says nothing about what more ranks share.
        """
        most = max((len(p.domain) for p in planned.everyone), default=1)
        asked = [p for p in planned.params if len(p.domain) == most]
        self._has_trained |= any(p.fqn not in absent for p in asked)
        for p in asked:
            if p.param.requires_grad and not self._has_trained:
                raise RuntimeError(
                    f"{p.fqn}: no parameter of the Muon groups has a gradient on the ranks "
                    "that share it. Call backward() first; if the model was wrapped, sharded or "
                    "moved after the optimizer was built, the optimizer still holds the old "
                    "parameters: build it afterwards, or replace the parameters in its param_groups"
                )

    def _job(self) -> Domain:
        """Ranks that take a step or leave it out together; none if every rank takes it."""
        if self._optimizer.settings.nonfinite == "propagate":
            return ()
        if not dist.is_initialized():
            return (0,)
        return tuple(sorted(dist.get_process_group_ranks(self._optimizer.settings.nonfinite_group)))

    def _skips(self, planned: Planned) -> bool:
        """Whether no rank takes this step because a gradient of some rank is not finite."""
        if self._optimizer.settings.nonfinite == "propagate":
            return False
        raises = self._optimizer.settings.nonfinite == "raise"
        fqn = nonfinite_param(self._exchange.groups, self._job(), planned, name_it=raises)
        if raises and fqn is not None:
            raise RuntimeError(
                f"{fqn}: the gradient has an infinite or NaN element, so no rank took this step. "
                "Weights and optimizer state are unchanged; lower the learning rate or the loss "
                "scale, look for the cause with torch.autograd.detect_anomaly(), or pass "
                'nonfinite="skip"'
            )
        return fqn is not None

    def _run(self, planned: Planned, absent: frozenset[str]) -> StepStats:
        stats, exchange = StepStats(), self._exchange
        before = exchange.bytes_sent, exchange.num_exchanges
        masters = [p for p in planned.everyone if MASTER in p.state]
        params = [local(p.param) for p in masters]
        copies = [local(p.state[MASTER]) for p in masters]
        refresh_(copies, params)
        drive(self._lives(planned, absent, stats))
        store_(params, copies)
        stats.bytes_sent = exchange.bytes_sent - before[0]
        stats.num_collectives = exchange.num_exchanges - before[1]
        return stats

    def _lives(self, planned: Planned, absent: frozenset[str], stats: StepStats) -> Iterator[Life]:
        """Every bucket; what needs no exchange runs while the first one is on its way."""
        shards = planned.shards(absent)
        buckets = planned.buckets(absent)
        planned.count_(absent)
        for bucket in buckets[:1]:
            yield bucket_life(bucket, shards, self._exchange, stats)
        planned.step_others(absent)
        for bucket in buckets[1:]:
            yield bucket_life(bucket, shards, self._exchange, stats)
