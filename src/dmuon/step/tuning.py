"""One table of measured times for a whole job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from dmuon.plan.cost import Timings
from dmuon.plan.plan import Domain
from dmuon.step.planned import Planned
from dmuon.transport.agreement import gather
from dmuon.transport.groups import Groups
from dmuon.tuning.measure import BatchKind, measure
from dmuon.tuning.table import default_path


def measure_together(
    groups: Groups, domains: Iterable[Domain], planned: Planned
) -> tuple[Timings, bool]:
    """Measure what all ranks orthogonalize, on the first of them, and tell it to the others.

    Args:
        groups: Process groups.
        domains: Those of this rank. The largest decides together.
        planned: The plan, made without measured times.

    Returns:
        The table, and whether this rank has measured it.

    Collective: all ranks of the largest domain. Blocks: until the first rank has measured.
    """
    domain = max(domains, key=len, default=(planned.rank,))
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
