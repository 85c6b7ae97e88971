"""Which rank owns which matrix: longest processing time first, then moves and swaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dmuon.layout.matrices import Piece
from dmuon.plan.cost import CostModel
from dmuon.plan.plan import Assignment, Domain, Request

_MAX_IMPROVEMENTS = 200
_MAX_PARTNERS = 8


@dataclass(slots=True)
class Loads:
    """Running cost and bytes of each rank while owners are chosen."""

    cost: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    num_bytes: dict[int, float] = field(default_factory=lambda: defaultdict(float))


def assign(
    requests: Sequence[Request],
    domain: Domain,
    model: CostModel,
    known: Sequence[Loads],
    *,
    repeat: bool,
) -> list[Assignment]:
    """Choose the owner of every matrix of a domain, the most expensive first.

    Args:
        requests: The matrices.
        domain: Ranks that store any part of them.
        model: What each costs.
        known: What those ranks carry already.
        repeat: One owner per replica.
    """
    carried = Loads()
    for loads in known:
        for rank in domain:
            carried.cost[rank] += loads.cost[rank]
            carried.num_bytes[rank] += loads.num_bytes[rank]
    running = Loads(carried.cost.copy(), carried.num_bytes.copy())
    # Many matrices are of one kind.
    kinds = {(r.matrix.shape, r.steps, r.ns_dtype) for r in requests}
    cost_of = {kind: model.cost(*kind) for kind in kinds}
    costs = {r.matrix: cost_of[r.matrix.shape, r.steps, r.ns_dtype] for r in requests}
    # Of equal costs those of one form are neighbors, so that they travel in one copy.
    heaviest_first = sorted(
        requests,
        key=lambda r: (
            *(-costs[r.matrix], str(r.method), sorted(r.matrix.shape)),
            *(r.matrix.shape, r.matrix.sort_key),
        ),
    )
    assignments = []
    for request in heaviest_first:
        held = request.source.pieces(request.matrix.block)
        owner = min(request.candidates, key=lambda rank: _preference(rank, held, running))
        # Mirrored owners run equal batches, so that replicas stay equal to the bit.
        owners = request.target.copies(owner) if repeat else (owner,)
        for rank in owners:
            running.cost[rank] += costs[request.matrix]
            running.num_bytes[rank] += request.num_bytes
        assignments.append(Assignment(request, owners, costs[request.matrix]))
    return _improve(assignments, carried.cost)


def _preference(
    rank: int, held: Mapping[int, Piece], running: Loads
) -> tuple[float, float, int, int]:
    """Least loaded first; then who already holds most of the matrix."""
    numel = held[rank].numel if rank in held else 0
    return running.cost[rank], running.num_bytes[rank], -numel, rank


def loads_of(assignments: Iterable[Assignment]) -> Loads:
    """Cost and bytes that assignments put on each rank."""
    loads = Loads()
    for a in assignments:
        for owner in a.owners:
            loads.cost[owner] += a.cost
            loads.num_bytes[owner] += a.request.num_bytes
    return loads


def _improve(assignments: list[Assignment], carried: Mapping[int, float]) -> list[Assignment]:
    """Move or swap matrices off the busiest rank while that lowers its load."""
    result = list(assignments)
    loads: dict[int, float] = defaultdict(float, carried)
    owned: dict[int, list[int]] = defaultdict(list)
    for i, a in enumerate(result):
        for owner in a.owners:
            loads[owner] += a.cost
            if len(a.owners) == 1:
                owned[owner].append(i)
    for _ in range(_MAX_IMPROVEMENTS):
        busiest = max(loads, key=lambda rank: (loads[rank], -rank))
        change = _best_change(result, loads, owned, busiest)
        if change is None:
            break
        give, take, other = change
        for index, old, new in ((give, busiest, other), (take, other, busiest)):
            if index is not None:
                a = result[index]
                result[index] = Assignment(a.request, (new,), a.cost)
                owned[old].remove(index)
                owned[new].append(index)
                loads[old] -= a.cost
                loads[new] += a.cost
    return result


def _best_change(
    assignments: list[Assignment],
    loads: dict[int, float],
    owned: dict[int, list[int]],
    busiest: int,
) -> tuple[int, int | None, int] | None:
    """The move (take None) or swap that lowers the larger of the two loads the most."""
    best, best_peak = None, loads[busiest] * (1 - 1e-9)
    for give in _one_per_cost(assignments, owned[busiest]):
        mine = assignments[give]
        others = [rank for rank in mine.request.candidates if rank != busiest]
        for other in sorted(others, key=lambda rank: (loads[rank], rank))[:_MAX_PARTNERS]:
            swaps = [
                i
                for i in _one_per_cost(assignments, owned[other])
                if busiest in assignments[i].request.candidates
            ]
            for take in (None, *swaps):
                saved = mine.cost - (0.0 if take is None else assignments[take].cost)
                peak = max(loads[busiest] - saved, loads[other] + saved)
                if peak < best_peak:
                    best, best_peak = (give, take, other), peak
    return best


def _one_per_cost(assignments: list[Assignment], indices: Iterable[int]) -> list[int]:
    """One index per cost, as matrices of equal cost are interchangeable."""
    return list({assignments[i].cost: i for i in indices}.values())
