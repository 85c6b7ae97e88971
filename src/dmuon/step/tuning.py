"""One table of measured times for a whole job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from dmuon.plan.cost import Timings
from dmuon.plan.plan import Domain
from dmuon.step.planned import Planned
from dmuon.transport.agreement import DIGEST_SIZE, agree, gather
from dmuon.transport.groups import Groups
from dmuon.tuning.measure import BatchKind, measure
from dmuon.tuning.table import default_path


def measure_together(
    groups: Groups, domains: Sequence[Domain], planned: Planned
) -> tuple[Timings, bool]:
    """Measure what all ranks orthogonalize, on the first of them, and tell it to the others.

    Args:
        groups: Process groups.
        domains: Those of this rank, smallest first. The largest decides together, if it holds the
            others; else nothing is measured.
        planned: The plan, made without measured times.

    Returns:
        The table, and whether this rank has measured it.

    Collective: all ranks of the largest domain. Blocks: until the first rank has measured.
    """
    domain = domains[-1] if domains else (planned.rank,)
    is_odd = any(not set(other) <= set(domain) for other in domains)
    # Asked in all domains: where they overlap without one holding the others, none decides for all.
    odd = [agree(groups, each, bytes(DIGEST_SIZE), [is_odd])[1] for each in domains]
    if [True] in odd:
        return Timings(), False
    said = gather(groups, domain, {kind.key: kind for kind in planned.batch_kinds()})
    kinds: dict[object, BatchKind] = {}
    for found in cast("dict[int, dict[object, BatchKind]]", said).values():
        kinds |= found
    is_first, timings = planned.rank == domain[0], Timings()
    if is_first and kinds:
        device = next(p.device for p in planned.everyone)
        timings = measure(kinds.values(), device, cache=default_path(device))
    said = gather(groups, domain, timings)
    return cast("dict[int, Timings]", said)[domain[0]], is_first
