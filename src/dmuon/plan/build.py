"""From requests to a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from dmuon.plan.balance import Loads, assign, loads_of
from dmuon.plan.cost import CostModel
from dmuon.plan.plan import Assignment, Bucket, Domain, Plan, Request, largest_first


def build_plan(
    requests: Iterable[Request],
    *,
    bucket_bytes: float,
    cost_model: CostModel | None = None,
    repeat: bool = False,
) -> Plan:
    """Choose the owner of every matrix and cut the exchange into buckets.

    Owners are chosen by longest processing time first (Graham 1969), then improved by moving and
    swapping matrices away from the busiest rank.

    Args:
        requests: The matrices, in any order.
        bucket_bytes: Bound on the bytes that one owner receives in one bucket; a larger matrix
            travels alone.
        cost_model: Cost of each matrix; FLOPs by default.
        repeat: Orthogonalize once per *replica* instead of once in the whole job, which moves
            nothing between replicas.

    Returns:
        The plan, equal for equal requests whatever their order.
    """
    model = cost_model or CostModel()
    by_domain: dict[Domain, list[Request]] = defaultdict(list)
    for request in requests:
        by_domain[request.domain].append(request)
    loads: dict[Domain, Loads] = {}
    buckets: list[Bucket] = []
    for domain in largest_first(by_domain):
        # Only loads that every rank of this domain knows may be carried into it.
        known = [loads[d] for d in loads if set(d) >= set(domain)]
        assignments = assign(by_domain[domain], domain, model, known, repeat=repeat)
        loads[domain] = loads_of(assignments)
        buckets += _fill_buckets(assignments, domain, bucket_bytes)
    return Plan(tuple(buckets))


def _fill_buckets(
    assignments: Sequence[Assignment], domain: Domain, bucket_bytes: float
) -> list[Bucket]:
    by_wire: dict[tuple[str, str], list[Assignment]] = defaultdict(list)
    for a in assignments:
        by_wire[a.request.wire_dtype, a.request.device_type].append(a)
    buckets = []
    for wire in sorted(by_wire):
        current: list[Assignment] = []
        received: dict[int, int] = defaultdict(int)
        for a in by_wire[wire]:
            size = a.request.num_bytes
            if any(received[o] and received[o] + size > bucket_bytes for o in a.owners):
                buckets.append(Bucket(domain, *wire, tuple(current)))
                current, received = [], defaultdict(int)
            current.append(a)
            for owner in a.owners:
                received[owner] += size
        buckets.append(Bucket(domain, *wire, tuple(current)))
    return buckets
