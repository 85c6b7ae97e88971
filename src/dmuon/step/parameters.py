"""The parameters as a plan sees them: from groups to requests, and to local tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.layout.layout import Layout, local_part, read_layout, wire_device
from dmuon.layout.matrices import matrices_of
from dmuon.newton_schulz import resolve_coefficients
from dmuon.newton_schulz.method import dtype_name
from dmuon.options import check_ns_dtype
from dmuon.plan.cost import Timings
from dmuon.plan.plan import Bucket, Description, Domain, Itinerary, Plan, Request
from dmuon.step.bucket import LocalShard
from dmuon.transport.exchange import reduced_grad

NamedParam = tuple[str, Tensor, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class MuonParam:
    """One parameter of a Muon group.

    Attributes:
        fqn: Fully qualified name.
        param: The parameter.
        weight: What a step changes: the parameter, or its master weight.
        momentum: Its `momentum_buffer`.
        group: Its parameter group.
        source: Layout of the momentum.
        target: Layout of the parameter.
        device: Where its matrices travel and are orthogonalized.
    """

    fqn: str
    param: Tensor
    weight: Tensor
    momentum: Tensor
    group: dict[str, Any]
    source: Layout
    target: Layout
    device: torch.device

    @classmethod
    def read(
        cls,
        named: NamedParam,
        state: Mapping[str, Tensor],
        process_group: dist.ProcessGroup | None,
    ) -> MuonParam:
        """Read the layouts of a parameter and its momentum."""
        fqn, param, group = named
        source, target = _read_layouts(named, state, "momentum_buffer", process_group)
        return cls(
            fqn,
            param,
            state.get("master_weight", param),
            state["momentum_buffer"],
            group,
            source,
            target,
            device=wire_device(param),
        )

    @property
    def domain(self) -> Domain:
        """Ranks that store any part of it."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    @property
    def has_grad(self) -> bool:
        """Whether this rank has a gradient for it."""
        return has_grad(self.param)

    def requests(self, tuning: Timings) -> Iterator[Request]:
        """Its matrices, as the planner takes them."""
        dtype = _ns_dtype(self.group, self.device)
        # float16 would overflow on the way: a gradient is only normalized at its owner.
        wire = torch.bfloat16 if dtype == torch.float16 else dtype
        coefficients = resolve_coefficients(self.group["ns_coefficients"], self.group["ns_steps"])
        check_ns_dtype(dtype, coefficients, self.fqn)
        # Ranks must agree on the table: batches, owners and rounding follow it.
        method = _method(self.group) + (f", tuning {tuning.digest}" if tuning.choices else "")
        flatten, split = self.group["flatten"], self.group["split"]
        for matrix in matrices_of(self.fqn, self.param.shape, flatten=flatten, split=split):
            if matrix.numel:
                yield Request(
                    matrix,
                    self.source,
                    self.target,
                    wire_dtype=dtype_name(wire),
                    ns_dtype=dtype_name(dtype),
                    device_type=self.device.type,
                    method=method,
                    steps=len(coefficients),
                )

    def local_shard(self, rank: int) -> LocalShard:
        """Local tensors of this rank."""
        grad = local_grad(self.param)
        if self.source is not self.target:
            grad = local_part(grad, self.source, rank)
        return LocalShard(local(self.weight), local(self.momentum), grad, self.group)


@dataclass(frozen=True, slots=True)
class AdamWParam:
    """One parameter of an AdamW group.

    Attributes:
        fqn: Fully qualified name.
        param: The parameter.
        group: Its parameter group.
        domain: Ranks that store any part of it.
        device: Where those ranks talk to each other about it.
    """

    fqn: str
    param: Tensor
    group: dict[str, Any]
    domain: Domain
    device: torch.device

    @classmethod
    def read(
        cls,
        named: NamedParam,
        state: Mapping[str, Tensor],
        process_group: dist.ProcessGroup | None,
    ) -> AdamWParam:
        """Read the layout of a parameter."""
        fqn, param, group = named
        _, layout = _read_layouts(named, state, "exp_avg", process_group)
        return cls(fqn, param, group, tuple(sorted(layout.ranks)), wire_device(param))

    @property
    def has_grad(self) -> bool:
        """Whether this rank has a gradient for it."""
        return has_grad(self.param)


class PlannedParams:
    """A plan with the parameters it was made for, and this rank's part in it.

    Attributes:
        signature: What the plan depends on; see `signature`.
        params: The Muon parameters.
        others: The AdamW parameters.
        everyone: Both.
        plan: The plan of the Muon parameters.
        job: Ranks that take a step together, and where they talk to each other; see `job_of`.
        rank: This rank.
        devices: Where the ranks of each domain agree on things.
        by_domain: Parameters of each domain, by name.
    """

    def __init__(
        self,
        signature: object,
        params: Sequence[MuonParam],
        others: Sequence[AdamWParam],
        plan: Plan,
        rank: int,
        job: tuple[Domain, torch.device],
    ) -> None:
        self.signature = signature
        self.params = params
        self.others = others
        self.job = job
        self.plan = plan
        self.rank = rank
        self.everyone: list[MuonParam | AdamWParam] = [*params, *others]
        self.devices = {p.domain: p.device for p in self.everyone}
        self.by_domain: dict[Domain, list[MuonParam | AdamWParam]] = {}
        for p in sorted(self.everyone, key=lambda p: p.fqn):
            self.by_domain.setdefault(p.domain, []).append(p)
        self._device_of = {p.device.type: p.device for p in params}
        self._parts: dict[frozenset[str], list[Itinerary]] = {}

    def describe(self, domain: Domain) -> Description:
        """All that the ranks of a domain must agree on."""
        others = [p for p in self.others if p.domain == domain]
        adamw = {p.fqn: (f"shape {tuple(p.param.shape)}, AdamW", "") for p in others}
        return {**self.plan.describe(domain), **dict(sorted(adamw.items()))}

    def parts(self, absent: frozenset[str]) -> list[Itinerary]:
        """This rank's part in every bucket when `absent` have no gradient on any rank."""
        if absent not in self._parts:
            buckets = [bucket.without(absent) for bucket in self.plan.buckets]
            # Experts that no token reached may differ at every step: keep the whole plan and this.
            self._parts = {key: parts for key, parts in self._parts.items() if not key}
            self._parts[absent] = [b.itinerary(self.rank) for b in buckets if b.assignments]
        return self._parts[absent]

    def device(self, bucket: Bucket) -> torch.device:
        """Where a bucket travels and its matrices are orthogonalized on this rank."""
        return self._device_of[bucket.device_type]

    def local_shards(self, absent: frozenset[str]) -> dict[str, LocalShard]:
        """Local tensors of every parameter that has a gradient on some rank, by name."""
        return {p.fqn: p.local_shard(self.rank) for p in self.params if p.fqn not in absent}


def job_of(params: Iterable[MuonParam | AdamWParam], rank: int) -> tuple[Domain, torch.device]:
    """All ranks of the default group, if any parameter lies on several; else this rank alone.

    Also where they talk to each other.
    """
    for p in params:
        if len(p.domain) > 1:
            return tuple(range(dist.get_world_size())), p.device
    return (rank,), torch.device("cpu")


def signature(
    named: Iterable[NamedParam], state: Mapping[Tensor, Mapping[str, Tensor]]
) -> list[object]:
    """Everything a plan depends on, or holds on to, that may change between steps."""
    named = list(named)
    # Facts of a group are read once, not once for each of its parameters.
    groups = {id(group): group for _, _, group in named}
    facts = [(g["use_muon"], g["flatten"], g["split"], _method(g)) for g in groups.values()]
    params = [
        (
            id(param),
            id(group),
            [id(tensor) for tensor in state.get(param, {}).values()],
            # A parameter that was frozen when the optimizer was built gets its state now.
            param.requires_grad and not state.get(param),
            param.shape,
            param.dtype,
            param.device,
            (param.device_mesh, param.placements) if isinstance(param, DTensor) else None,
        )
        for _, param, group in named
    ]
    return [facts, params]


def _read_layouts(
    named: NamedParam,
    state: Mapping[str, Tensor],
    key: str,
    process_group: dist.ProcessGroup | None,
) -> tuple[Layout, Layout]:
    """Layouts of a parameter's state and of the parameter.

    Raises:
        ValueError: The parameter is another than its state was made for.
    """
    fqn, param, _ = named
    target = read_layout(fqn, param, process_group)
    if key in state:
        source = read_layout(fqn, state[key], process_group)
        replicated = all(placement is None for placement in target.placements)
        if source == target:
            return target, target  # one object, which compares with itself at no cost
        if source.shape == target.shape and replicated:
            return source, target
    raise ValueError(
        f"{fqn}: the shape, layout or algorithm of this parameter was changed under its optimizer "
        f"state (it is {target.shape} on {target}). Remove its entry from optimizer.state to "
        "start its state afresh, or load a state dict that was saved before the change"
    )


def local(tensor: Tensor) -> Tensor:
    """What this rank stores of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_grad(param: Tensor) -> Tensor:
    """This rank's gradient of a parameter, in its layout; zeros if only other ranks have one."""
    return local(reduced_grad(param)) if has_grad(param) else torch.zeros_like(local(param))


def has_grad(param: Tensor) -> bool:
    """Whether this rank has a gradient for a parameter; a frozen parameter has none."""
    return param.requires_grad and param.grad is not None


def first_nonfinite(params: Iterable[MuonParam | AdamWParam]) -> str | None:
    """Name of the first parameter whose gradient has an infinite or NaN element on this rank.

    Blocks: the host waits for the device.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    names = {}
    for i, p in enumerate(params):
        if p.has_grad and (grad := local_grad(p.param)).numel():
            names[i] = p.fqn
            by_kind.setdefault((grad.device, grad.dtype), {})[i] = grad
    found = []
    for grads in by_kind.values():
        # The largest entry is infinite or NaN exactly if any entry is.
        largest = torch.stack(torch._foreach_norm(list(grads.values()), torch.inf))
        finite = zip(grads, largest.isfinite().tolist(), strict=True)
        found += [i for i, ok in finite if not ok]
    return names[min(found)] if found else None


def _ns_dtype(group: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """The group's `ns_dtype`; by default float32 on CPU and bfloat16 elsewhere."""
    dtype = group["ns_dtype"]
    if dtype is not None:
        return dtype  # type: ignore[no-any-return]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _method(group: Mapping[str, Any]) -> str:
    return (
        f"coefficients {group['ns_coefficients']}, {group['ns_steps']} steps, "
        f"eps {group['eps']}, {group['ns_dtype']}"
    )
