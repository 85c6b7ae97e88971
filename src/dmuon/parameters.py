"""The Muon parameters as a plan sees them: from groups to requests, and to local tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.layout import Layout, local_part, read_layout, wire_device
from dmuon.matrices import matrices_of
from dmuon.orthogonalize import resolve_coefficients
from dmuon.pipeline import LocalShard, ns_dtype
from dmuon.plan import Domain, Itinerary, Plan, Request

NamedParam = tuple[str, Tensor, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class MuonParam:
    """One parameter of a Muon group.

    Attributes:
        fqn: Fully qualified name.
        param: The parameter.
        momentum: Its `momentum_buffer`.
        group: Its parameter group.
        source: Layout of the momentum.
        target: Layout of the parameter.
        device: Where its matrices travel and are orthogonalized.
    """

    fqn: str
    param: Tensor
    momentum: Tensor
    group: dict[str, Any]
    source: Layout
    target: Layout
    device: torch.device

    @classmethod
    def read(
        cls, named: NamedParam, momentum: Tensor, process_group: dist.ProcessGroup | None
    ) -> MuonParam:
        """Read the layouts of a parameter and its momentum."""
        fqn, param, group = named
        return cls(
            fqn,
            param,
            momentum,
            group,
            source=read_layout(fqn, momentum, process_group),
            target=read_layout(fqn, param, process_group),
            device=wire_device(param),
        )

    @property
    def domain(self) -> Domain:
        """Ranks that store any part of it."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    @property
    def has_grad(self) -> bool:
        """Whether this rank has a gradient for it; a frozen parameter has none."""
        return self.param.requires_grad and self.param.grad is not None

    def requests(self) -> Iterator[Request]:
        """Its matrices, as the planner takes them."""
        dtype = ns_dtype(self.group, self.device)
        # float16 would overflow on the way: a gradient is only normalized at its owner.
        wire = torch.bfloat16 if dtype == torch.float16 else dtype
        coefficients = resolve_coefficients(self.group["ns_coefficients"], self.group["ns_steps"])
        flatten, split = self.group["flatten"], self.group["split"]
        for matrix in matrices_of(self.fqn, self.param.shape, flatten=flatten, split=split):
            if matrix.numel:
                yield Request(
                    matrix,
                    self.source,
                    self.target,
                    wire_dtype=str(wire).removeprefix("torch."),
                    device_type=self.device.type,
                    method=_method(self.group),
                    steps=len(coefficients),
                )

    def local_shard(self, rank: int) -> LocalShard:
        """Local tensors of this rank; zeros for a gradient that only other ranks have."""
        param = local(self.param)
        grad = local_grad(self.param) if self.has_grad else torch.zeros_like(param)
        if self.source != self.target:
            grad = local_part(grad, self.source, rank)
        return LocalShard(param, local(self.momentum), grad, self.group)


class PlannedParams:
    """A plan with the parameters it was made for, and this rank's part in it.

    Attributes:
        signature: What the plan depends on; see `signature`.
        params: The Muon parameters.
        plan: Their plan.
        rank: This rank.
        devices: Where each domain exchanges.
        by_domain: Parameters of each domain, by name.
    """

    def __init__(
        self, signature: object, params: Sequence[MuonParam], plan: Plan, rank: int
    ) -> None:
        self.signature = signature
        self.params = params
        self.plan = plan
        self.rank = rank
        self.devices = {p.domain: p.device for p in params}
        self.by_domain: dict[Domain, list[MuonParam]] = {}
        for p in sorted(params, key=lambda p: p.fqn):
            self.by_domain.setdefault(p.domain, []).append(p)
        self._parts: dict[frozenset[str], list[Itinerary]] = {}

    def parts(self, absent: frozenset[str]) -> list[Itinerary]:
        """This rank's part in every bucket when `absent` have no gradient on any rank."""
        if absent not in self._parts:
            buckets = [bucket.without(absent) for bucket in self.plan.buckets]
            self._parts[absent] = [b.itinerary(self.rank) for b in buckets if b.assignments]
        return self._parts[absent]

    def local_shards(self, absent: frozenset[str]) -> dict[str, LocalShard]:
        """Local tensors of every parameter that has a gradient on some rank, by name."""
        return {p.fqn: p.local_shard(self.rank) for p in self.params if p.fqn not in absent}


def signature(named: Iterable[NamedParam]) -> list[object]:
    """Everything a plan depends on that may change between steps."""
    return [
        (
            id(param),
            param.dtype,
            param.device,
            (param.device_mesh, param.placements) if isinstance(param, DTensor) else None,
            group["use_muon"],
            group["flatten"],
            group["split"],
            _method(group),
        )
        for _, param, group in named
    ]


def local(tensor: Tensor) -> Tensor:
    """What this rank stores of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_grad(param: Tensor) -> Tensor:
    """This rank's gradient of a parameter, in the parameter's layout.

    Tensor parallelism may leave a gradient `Partial`; it is reduced here.
    """
    grad = param.grad
    assert grad is not None
    if (
        isinstance(param, DTensor)
        and isinstance(grad, DTensor)
        and grad.placements != param.placements
    ):
        grad = grad.redistribute(placements=param.placements)
    return local(grad)


def _method(group: Mapping[str, Any]) -> str:
    return (
        f"coefficients {group['ns_coefficients']}, {group['ns_steps']} steps, "
        f"eps {group['eps']}, {group['ns_dtype']}"
    )
