"""What the hosts of a domain tell each other: small, on the CPU, and waited for at once.

[Note: agreed before anything moves] A rank that decides alone whether to enter a collective makes
the others wait. So at every step each rank first tells all ranks of its domains whether something
is wrong with it, and what it is about to do; and all of them act on the same answer. The answer is
a maximum: of flags, and of a digest and its complement, which add up to all ones exactly if every
rank has the same digest. Its size does not depend on what a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dmuon.plan.plan import Domain
from dmuon.transport.groups import Groups, host_device

DIGEST_SIZE = 8


def agree(
    groups: Groups, domain: Domain, digest: bytes, flags: Sequence[bool]
) -> tuple[bool, list[bool]]:
    """Return whether all ranks have the same digest, and which flags any of them has set.

    Args:
        groups: Process groups.
        domain: Ranks that are asked.
        digest: `DIGEST_SIZE` bytes.
        flags: As many on every rank.

    Collective: all ranks of the domain. Blocks: the host, until all of them have called.
    """
    if len(domain) == 1:
        return True, list(flags)
    found = maxima(groups, domain, [*digest, *(255 - byte for byte in digest), *flags])
    ones = zip(found[:DIGEST_SIZE], found[DIGEST_SIZE : 2 * DIGEST_SIZE], strict=True)
    same = all(byte + complement == 255 for byte, complement in ones)
    return same, [bool(flag) for flag in found[2 * DIGEST_SIZE :]]


def maxima(groups: Groups, domain: Domain, values: Sequence[int]) -> list[int]:
    """Return the maximum of each value, 0 to 255, over the ranks of a domain.

    Collective: all ranks of the domain. Blocks: the host.
    """
    if len(domain) == 1:
        return list(values)
    group = groups.host(domain)
    tensor = torch.tensor(values, dtype=torch.uint8, device=host_device(group))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def gather(groups: Groups, domain: Domain, value: object) -> dict[int, object]:
    """Return what every rank of a domain says.

    Collective: all ranks of the domain. Blocks: the host.
    """
    if len(domain) == 1:
        return {domain[0]: value}
    values: list[object] = [None] * len(domain)
    dist.all_gather_object(values, value, group=groups.host(domain))
    return dict(zip(domain, values, strict=True))
