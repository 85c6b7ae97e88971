"""A plan with the parameters it was made for, and this rank's part in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon.algorithms import ALGORITHMS, Matrices, StateKind
from dmuon.layout.local import local, local_grad, local_part
from dmuon.newton_schulz import Backend, Method
from dmuon.options import scales_of
from dmuon.plan.batches import batch_shapes, resolve_backend
from dmuon.plan.cost import Timings
from dmuon.plan.fingerprint import Description, describe, digest
from dmuon.plan.plan import Domain, Plan, Request
from dmuon.plan.program import program_of
from dmuon.step.bucket import LocalBucket, Shards
from dmuon.step.parameters import PlannedParam
from dmuon.transport.agreement import DIGEST_SIZE
from dmuon.tuning.measure import BatchKind


class Planned:
    """A plan with the parameters it was made for.

    Args:
        params: Parameters of which this rank stores a part.
        plan: The plan of their matrices.
        timings: Measured times that it follows.
        rank: This rank.
        options: The optimizer's own options, which ranks must agree on.

    Attributes:
        signature: What it depends on; see `dmuon.step.parameters.signature`.
        plan: As given.
        rank: As given.
        params: The parameters whose matrices are orthogonalized.
        others: Those that are optimized element by element.
        everyone: Both.
        by_domain: Names and parameters of each domain, by name.
    """

    def __init__(
        self,
        params: Sequence[PlannedParam],
        plan: Plan,
        *,
        timings: Timings,
        rank: int,
        options: str,
    ) -> None:
        self.signature: object = None
        self.plan = plan
        self.rank = rank
        self.everyone = params
        self.params = [p for p in params if p.algorithm.matrices]
        self.others = [p for p in params if not p.algorithm.matrices]
        self._members = members = _members(params)
        self.by_domain = {d: [(p.fqn, p.param) for p in found] for d, found in members.items()}
        self._timings, self._options = timings, options
        self._groups = {
            domain: {id(p.group): p for p in reversed(found)} for domain, found in members.items()
        }
        self._digests = {domain: digest(self._describe(domain)) for domain in members}
        self._buckets: dict[frozenset[str], list[LocalBucket]] = {}

    def digest(self, domain: Domain) -> bytes:
        """Short hash of all that the ranks of a domain must agree on at this step."""
        now = "".join(hyperparameters(p.group) for p in self._groups.get(domain, {}).values())
        planned = self._digests.get(domain, b"")
        return hashlib.sha256(planned + now.encode()).digest()[:DIGEST_SIZE]

    def describe(self, domain: Domain) -> Description:
        """All that the ranks of a domain must agree on at this step."""
        firsts = self._groups.get(domain, {}).values()
        now = {f"{p.fqn} and its group": (hyperparameters(p.group), "") for p in firsts}
        return {**self._describe(domain), **now}

    def _describe(self, domain: Domain) -> Description:
        firsts = self._groups.get(domain, {})
        params = {
            p.fqn: (f"{_facts(p)}, in the group of {firsts[id(p.group)].fqn}", "")
            for p in self._members.get(domain, [])
        }
        options = f"{self._options}, tuning {self._timings.digest}"
        first = next(iter(params), "no parameter")
        mine = {f"{first} and the optimizer's options": (options, "")}
        return {**describe(self.plan, domain), **params, **mine}

    def buckets(self, absent: frozenset[str]) -> list[LocalBucket]:
        """This rank's part in every bucket when `absent` have no gradient on any rank."""
        if absent not in self._buckets:
            # Experts that no token reached may differ at every step: keep the whole plan and this.
            self._buckets = {key: found for key, found in self._buckets.items() if not key}
            self._buckets[absent] = self._bind(absent)
        return self._buckets[absent]

    def _bind(self, absent: frozenset[str]) -> list[LocalBucket]:
        params = {p.fqn: p for p in self.params}
        devices = {p.device.type: p.device for p in self.params}
        found = []
        for bucket in (bucket.without(absent) for bucket in self.plan.buckets):
            if bucket.assignments:
                device = devices[bucket.device_type]
                program = program_of(bucket.itinerary(self.rank), self._stacking)
                found.append(LocalBucket.bind(program, params, device, self._choice(device)))
        return found

    def batch_kinds(self) -> list[BatchKind]:
        """What this rank orthogonalizes in one call each."""
        return [
            BatchKind(run.method, batch.stacks[""].shape[0], batch.stacks[""].shape[1:])
            for bucket in self.buckets(frozenset())
            for batch, run in zip(bucket.program.batches, bucket.batches, strict=True)
            if run.stages.spectral is None
        ]

    def _stacking(
        self, request: Request, shapes: Sequence[tuple[int, int]]
    ) -> list[tuple[tuple[int, int], list[int]]]:
        # Padding would add rows of zeros to what a later stage sees.
        timings = Timings() if request.finish else self._timings
        return batch_shapes(shapes, timings, dtype=request.ns_dtype, steps=request.steps)

    def _choice(self, device: torch.device) -> Any:  # noqa: ANN401
        def choose(method: Method, shape: tuple[int, int, int]) -> tuple[Backend, int]:
            return resolve_backend(method, self._timings, shape[0], shape[1:], device)

        return choose

    def shards(self, absent: frozenset[str]) -> Shards:
        """Local tensors of every parameter of matrices that has a gradient on some rank."""
        present = [p for p in self.params if p.fqn not in absent]
        states: dict[str, dict[str, Tensor]] = {}
        for p in present:
            for key in p.algorithm.state:
                states.setdefault(key, {})[p.fqn] = local(p.state[key])
        weights = {p.fqn: local(p.weight) for p in present}
        return Shards(weights, {p.fqn: self._grad(p) for p in present}, states)

    def _grad(self, p: PlannedParam) -> Tensor:
        """Local gradient, cut as the momentum is."""
        grad = local_grad(p.param)
        return grad if p.source is p.target else local_part(grad, p.source, self.rank)

    def count_(self, absent: frozenset[str]) -> None:
        """Count the step in the state of the parameters whose matrices take part in it.

        Modifies: state.
        """
        for p in self.params:
            for key in p.algorithm.keys(StateKind.COUNT):
                if p.fqn not in absent:
                    p.state[key].add_(1)

    def step_others(self, absent: frozenset[str]) -> None:
        """Optimize the parameters that need no exchange."""
        groups: dict[int, list[PlannedParam]] = {}
        for p in self.others:
            if p.fqn not in absent:
                groups.setdefault(id(p.group), []).append(p)
        for members in groups.values():
            algorithm = members[0].algorithm
            assert not isinstance(algorithm.stages, Matrices)
            states = {key: [local(p.state[key]) for p in members] for key in algorithm.state}
            likes = states[algorithm.keys(StateKind.ELEMENTS)[0]]
            grads = [
                local_grad(p.param).to(like.dtype) for p, like in zip(members, likes, strict=True)
            ]
            weights = [local(p.weight) for p in members]
            algorithm.stages(weights, grads, states, members[0].group)


def _members(params: Sequence[PlannedParam]) -> dict[Domain, list[PlannedParam]]:
    """Parameters of each domain, by name: ranks may list them in any order."""
    found: dict[Domain, list[PlannedParam]] = {}
    for p in sorted(params, key=lambda p: p.fqn):
        found.setdefault(p.domain, []).append(p)
    return found


def _facts(p: PlannedParam) -> str:
    """What ranks must agree on of a parameter, besides its matrices."""
    scales = [*scales_of(p.group, p.param.shape).values()] if p.algorithm.matrices else []
    return (
        f"shape {p.target.shape}, {p.algorithm.name}, {p.target}, {p.param.dtype}, requires_grad "
        f"{p.param.requires_grad}, scales {scales}"
    )


def hyperparameters(group: Mapping[str, Any]) -> str:
    """What a step reads of a group, in a line that its ranks can compare.

    A learning rate on an accelerator is not read: that would wait for the device.
    """
    algorithm = ALGORITHMS[group["algorithm"]]
    values = {key: group[key] for key in (*algorithm.hyperparameters, *algorithm.options)}
    return algorithm.name + "".join(f", {key} {_text(value)}" for key, value in values.items())


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return repr(value.item()) if value.device.type == "cpu" else "a tensor"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)
