"""Pieces to owners and back.

[Note: one transport] Every exchange is one `all_to_all_single` with exact split sizes. It is the
one collective that allows unequal and zero splits, runs asynchronously, and behaves alike on gloo
and NCCL, so no byte is sent that does not have to move.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from dmuon.plan.plan import Domain
from dmuon.plan.program import Transfer
from dmuon.transport.groups import Groups


@dataclass(slots=True)
class Flight:
    """Elements under way."""

    received: Tensor
    sent: Tensor
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        """Return what was received, flat.

        Blocks: the host on gloo; only the current stream on NCCL.
        """
        if self.work is not None:
            self.work.wait()
        self.work, self.sent = None, self.received
        return self.received


class Exchange:
    """Sends the pieces of one optimizer's buckets.

    Attributes:
        bytes_sent: Bytes of pieces that this rank has sent to other ranks.
        num_exchanges: Exchanges that this rank has taken part in.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.num_exchanges = 0

    @property
    def groups(self) -> Groups:
        """Process groups of the domains."""
        return Groups.shared()

    def launch(self, domain: Domain, transfer: Transfer, outbox: Tensor) -> Flight:
        """Start one exchange.

        Collective: all ranks of the domain.

        Args:
            domain: Who takes part.
            transfer: What this rank sends and receives.
            outbox: What it sends, flat, on the device of the exchange.
        """
        received = outbox.new_empty(transfer.num_received)
        if not transfer.moves:
            return Flight(received, outbox)
        work = dist.all_to_all_single(
            received,
            outbox,
            list(transfer.receive_splits),
            list(transfer.send_splits),
            group=self.groups.of(domain),
            async_op=True,
        )
        self.bytes_sent += outbox.numel() * outbox.element_size()
        self.num_exchanges += 1
        return Flight(received, outbox, work)

    def add(self, domain: Domain, sums: Tensor) -> Flight:
        """Start to add up what each rank has, in place; the result has the same bits everywhere.

        Collective: all ranks of the domain. A few numbers per matrix, no piece: not in
        `bytes_sent`.
        """
        if len(domain) == 1:
            return Flight(sums, sums)
        work = dist.all_reduce(sums, group=self.groups.of(domain), async_op=True)
        self.num_exchanges += 1
        return Flight(sums, sums, work)
