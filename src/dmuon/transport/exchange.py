"""Pieces to owners and back: the only file that talks to other ranks during a step.

[Note: one transport] Every exchange is one `all_to_all_single` with exact split sizes. It is the
one collective that allows unequal and zero splits, runs asynchronously, and behaves alike on gloo
and NCCL, so no byte is sent that does not have to move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.plan.plan import Bucket, Description, Domain, Leg, Route, digest, largest_first


@dataclass(slots=True)
class Flight:
    """Pieces under way; `wait` returns them in the order of the route's receives."""

    legs: tuple[Leg, ...]
    received: Tensor | None = None
    sent: Tensor | None = None
    work: dist.Work | None = None

    def wait(self) -> list[Tensor]:
        """Return the received pieces, flat, as views of one buffer.

        Blocks: the host on gloo; only the current stream on NCCL.
        """
        if self.work is not None:
            self.work.wait()
        self.work = self.sent = None
        if self.received is None:
            return []
        return list(self.received.split([leg.piece.numel for leg in self.legs]))


@dataclass(slots=True)
class Agreement:
    """A flag per parameter, reduced over a domain: true where any rank says so."""

    flags: Tensor
    work: dist.Work | None

    def wait(self) -> list[bool]:
        """Return the agreed flags. Blocks: the host."""
        if self.work is not None:
            self.work.wait()
        return [bool(flag) for flag in self.flags.tolist()]


class Exchange:
    """Process groups of one optimizer's domains, and what it sent through them.

    Attributes:
        bytes_sent: Bytes of pieces that this rank has sent to other ranks.
        num_collectives: Exchanges that this rank has taken part in.
    """

    def __init__(self) -> None:
        self._groups: dict[Domain, dist.ProcessGroup] = {}
        self._agreed: dict[Domain, bytes] = {}
        self.bytes_sent = 0
        self.num_collectives = 0

    def adopt(self, group: dist.ProcessGroup) -> None:
        """Use an existing group for the domain of its ranks."""
        ranks = tuple(dist.get_process_group_ranks(group))
        # Split sizes are listed by rank, so a group in another order cannot serve.
        if ranks == tuple(sorted(ranks)):
            self._groups.setdefault(ranks, group)

    def prepare(
        self, devices: dict[Domain, torch.device], describe: Callable[[Domain], Description]
    ) -> None:
        """Make a group for every domain and check that its ranks agree about it.

        A domain is checked again only when it has changed: ranks that share it but not the domain
        that did change do not take part.

        Collective: all ranks of each domain that is new or has changed.

        Args:
            devices: The domains, and where each exchanges.
            describe: What this rank knows and plans of a domain.

        Raises:
            RuntimeError: On all ranks, if any two differ; names the first parameter.
        """
        shared = largest_first(domain for domain in devices if len(domain) > 1)
        descriptions = {domain: describe(domain) for domain in shared}
        digests = {domain: digest(description) for domain, description in descriptions.items()}
        shared = [domain for domain in shared if self._agreed.get(domain) != digests[domain]]
        error = None
        for domain in shared:
            self._group(domain)
            found = self._disagreement(descriptions[domain], domain, devices[domain])
            error = error or found
        # From part of a larger domain to all of it, or the others would wait for this rank.
        for domain in reversed(shared):
            error = self.first_of(domain, error)
        if error is not None:
            raise RuntimeError(error)
        self._agreed |= {domain: digests[domain] for domain in shared}

    def agree(self, domain: Domain, flags: Sequence[bool], device: torch.device) -> Agreement:
        """Start to combine a flag per parameter over the ranks of a domain.

        Collective: all ranks of the domain.
        """
        if len(domain) == 1:
            return Agreement(torch.tensor(flags, dtype=torch.uint8), None)
        # Filled on the device: a copy from the host would wait until backward has ended there.
        tensor = torch.ones(len(flags), dtype=torch.uint8, device=device)
        if not all(flags):
            tensor = torch.tensor(flags, dtype=torch.uint8, device=device)
        group = self._group(domain)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
        return Agreement(tensor, work)

    def first_of(self, domain: Domain, text: str | None) -> str | None:
        """Return what the lowest rank of a domain says that says anything.

        Collective: all ranks of the domain.
        """
        texts = [text]
        if len(domain) > 1:
            texts = [None] * len(domain)
            dist.all_gather_object(texts, text, group=self._group(domain))
        return next((text for text in texts if text is not None), None)

    def launch(
        self, bucket: Bucket, route: Route, pieces: Sequence[Tensor], device: torch.device
    ) -> Flight:
        """Start one exchange.

        Collective: all ranks of the bucket's domain.

        Args:
            bucket: The bucket that travels.
            route: What this rank sends and receives.
            pieces: One tensor for each of `route.sends`, of the piece's number of elements.
            device: Where the exchange runs.
        """
        if not route.moves:
            return Flight(())
        dtype = getattr(torch, bucket.wire_dtype)
        sent = _pack(pieces, dtype, device)
        received = sent.new_empty(sum(leg.piece.numel for leg in route.receives))
        work = dist.all_to_all_single(
            received,
            sent,
            _splits(route.receives, bucket.domain),
            _splits(route.sends, bucket.domain),
            group=self._group(bucket.domain),
            async_op=True,
        )
        self.bytes_sent += sent.numel() * sent.element_size()
        self.num_collectives += 1
        return Flight(route.receives, received, sent, work)

    def _group(self, domain: Domain) -> dist.ProcessGroup:
        if domain not in self._groups:
            world = dist.group.WORLD
            if world is not None and domain == tuple(range(world.size())):
                self._groups[domain] = world
            else:
                # Only members call, so ranks outside the domain need not know of it.
                self._groups[domain] = dist.new_group(list(domain), use_local_synchronization=True)
        return self._groups[domain]

    def _disagreement(
        self, description: Description, domain: Domain, device: torch.device
    ) -> str | None:
        group = self._group(domain)
        mine = torch.tensor(list(digest(description)), dtype=torch.uint8, device=device)
        prints = [torch.empty_like(mine) for _ in domain]
        dist.all_gather(prints, mine, group=group)
        if all(torch.equal(other, mine) for other in prints):
            return None
        found: list[Description] = [{} for _ in domain]
        dist.all_gather_object(found, description, group=group)
        return _difference(dict(zip(domain, found, strict=True)))


def reduced_grad(param: Tensor) -> Tensor:
    """The gradient of a parameter, in the parameter's layout.

    Tensor parallelism may leave a gradient `Partial`; it is reduced here.
    """
    grad = param.grad
    assert grad is not None
    if (
        isinstance(param, DTensor)
        and isinstance(grad, DTensor)
        and grad.placements != param.placements
    ):
        return grad.redistribute(placements=param.placements)
    return grad


def _pack(pieces: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    packed = torch.empty(sum(p.numel() for p in pieces), dtype=dtype, device=device)
    if pieces:
        slots = packed.split([p.numel() for p in pieces])
        views = [slot.view(p.shape) for slot, p in zip(slots, pieces, strict=True)]
        torch._foreach_copy_(views, list(pieces))
    return packed


def _splits(legs: Sequence[Leg], domain: Domain) -> list[int]:
    numel = dict.fromkeys(domain, 0)
    for leg in legs:
        numel[leg.peer] += leg.piece.numel
    return list(numel.values())


def _difference(descriptions: dict[int, Description]) -> str:
    """Name the first parameter about which ranks disagree, and what each found."""
    missing = "nothing of this name", ""
    keys = sorted({key for description in descriptions.values() for key in description})
    # One parameter that differs moves the owners of others: what ranks found comes first.
    for part in (0, 1):
        for key in keys:
            found = {rank: d.get(key, missing) for rank, d in descriptions.items()}
            if len({lines[part] for lines in found.values()}) > 1:
                text = "\n".join(f"  rank {rank}: {lines[part]}" for rank, lines in found.items())
                return (
                    f"{key}: ranks disagree about this parameter, so they cannot exchange it:\n"
                    f"{text}\nBuild the same model, the same parameter groups and the same "
                    "sharding on every rank of the mesh"
                )
    raise AssertionError("fingerprints differ but plans do not")
