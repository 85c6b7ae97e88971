"""Who orthogonalizes what, and what travels: pure data, the same on every rank.

Matrices are planned per *domain*, the set of ranks that store any part of them. A plan depends
on names, shapes and layouts only, never on the rank that computes it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dmuon.layout.layout import Layout
from dmuon.layout.matrices import Matrix, Piece
from dmuon.plan.cost import CostModel

Domain = tuple[int, ...]
# Per matrix or parameter, what ranks must agree on: what it is, and what was planned for it.
Description = dict[str, tuple[str, str]]

_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_MAX_IMPROVEMENTS = 200
_MAX_PARTNERS = 8


@dataclass(frozen=True, slots=True)
class Request:
    """A matrix that must be orthogonalized every step.

    Attributes:
        matrix: The matrix.
        source: Layout of the momentum, where pieces are gathered from.
        target: Layout of the parameter, where pieces of the update go.
        wire_dtype: dtype in which pieces travel, such as "float32".
        ns_dtype: dtype in which it is orthogonalized.
        device_type: Where they travel, such as "cpu" or "cuda".
        method: How it is orthogonalized; matrices of equal method and shape share a batch.
        steps: Number of Newton-Schulz steps.
    """

    matrix: Matrix
    source: Layout
    target: Layout
    wire_dtype: str
    ns_dtype: str
    device_type: str
    method: str
    steps: int

    @property
    def domain(self) -> Domain:
        """Ranks that store any part of the parameter."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    @property
    def candidates(self) -> tuple[int, ...]:
        """Ranks that may own it: all that hold a piece, replicas included."""
        block = self.matrix.block
        return tuple(sorted({*self.source.pieces(block), *self.target.pieces(block)}))

    @property
    def num_bytes(self) -> int:
        """Size of the whole matrix on the wire."""
        return self.matrix.numel * _ITEMSIZE[self.wire_dtype]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A matrix with its owners.

    Attributes:
        request: The matrix and its layouts.
        owners: One rank; or one rank per replica, where the work is repeated instead of its
            result published.
        cost: Cost of orthogonalizing it, in the cost model's unit.
    """

    request: Request
    owners: tuple[int, ...]
    cost: float

    def gathers_to(self, holder: int) -> list[int]:
        """Owners that take the source piece of `holder`: those in its own replica."""
        source = self.request.source
        if source.num_replicas == 1:
            return list(self.owners)
        replica = source.replica(holder)
        return [owner for owner in self.owners if source.replica(owner) == replica]

    def served_by(self, holder: int) -> list[int]:
        """The owner that sends `holder` its piece of the update."""
        if len(self.owners) == 1:
            return [self.owners[0]]
        return [self.owners[self.request.target.replica(holder)]]


@dataclass(frozen=True, slots=True)
class Leg:
    """One piece on its way between this rank and `peer`; `position` is its place in the bucket."""

    peer: int
    position: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends, receives and keeps in one exchange of a bucket.

    `moves` is false when no rank has anything to send, so that the exchange can be left out.
    """

    sends: tuple[Leg, ...]
    receives: tuple[Leg, ...]
    kept: tuple[Leg, ...]
    moves: bool

    def inverse(self) -> Route:
        """The same pieces, travelling the other way."""
        return Route(self.receives, self.sends, self.kept, self.moves)


@dataclass(frozen=True, slots=True)
class Itinerary:
    """One rank's part in a bucket.

    Attributes:
        bucket: The bucket.
        held: The rank's piece of each matrix's momentum, by position in the bucket.
        gather: Pieces of the momentum on their way to the owners.
        scatter: Pieces of the update on their way to every rank that stores them.
    """

    bucket: Bucket
    held: Mapping[int, Piece]
    gather: Route
    scatter: Route


@dataclass(frozen=True, slots=True)
class Bucket:
    """Matrices that travel together, in one collective each way.

    Attributes:
        domain: Ranks that take part.
        wire_dtype: dtype of everything that travels.
        device_type: Where it travels.
        assignments: The matrices, in an order that is the same on every rank.
    """

    domain: Domain
    wire_dtype: str
    device_type: str
    assignments: tuple[Assignment, ...]

    def without(self, fqns: frozenset[str]) -> Bucket:
        """The bucket when the parameters `fqns` have no gradient on any rank."""
        kept = tuple(a for a in self.assignments if a.request.matrix.fqn not in fqns)
        return Bucket(self.domain, self.wire_dtype, self.device_type, kept)

    def itinerary(self, rank: int) -> Itinerary:
        """The part of `rank`: what it holds, sends and receives."""
        held = {}
        for position, a in enumerate(self.assignments):
            piece = a.request.source.pieces(a.request.matrix.block).get(rank)
            if piece is not None:
                held[position] = piece
        gather = self._route(rank, lambda a: a.request.source, Assignment.gathers_to)
        back = self._route(rank, lambda a: a.request.target, Assignment.served_by)
        return Itinerary(self, held, gather, back.inverse())

    def _route(
        self,
        rank: int,
        layout_of: Callable[[Assignment], Layout],
        owners_of: Callable[[Assignment, int], list[int]],
    ) -> Route:
        sends, receives, kept, moves = [], [], [], False
        for position, a in enumerate(self.assignments):
            pieces = layout_of(a).pieces(a.request.matrix.block)
            moves = moves or any(owner != h for h in pieces for owner in owners_of(a, h))
            # Only an owner deals with every holder; the others deal with their own piece.
            for holder in pieces if rank in a.owners else pieces.keys() & {rank}:
                for owner in owners_of(a, holder):
                    leg = Leg(owner if holder == rank else holder, position, pieces[holder])
                    if holder == owner == rank:
                        kept.append(leg)
                    elif holder == rank:
                        sends.append(leg)
                    elif owner == rank:
                        receives.append(leg)
        return Route(_by_peer(sends), _by_peer(receives), tuple(kept), moves)


def _by_peer(legs: list[Leg]) -> tuple[Leg, ...]:
    return tuple(sorted(legs, key=lambda leg: (leg.peer, leg.position)))


@dataclass(frozen=True, slots=True)
class Plan:
    """Owners, order and buckets of one optimizer's exchanges.

    Attributes:
        buckets: In the order in which they are exchanged.
    """

    buckets: tuple[Bucket, ...] = ()

    @property
    def assignments(self) -> list[Assignment]:
        """Every matrix with its owners."""
        return [a for bucket in self.buckets for a in bucket.assignments]

    @property
    def domains(self) -> list[Domain]:
        """Rank sets, largest first."""
        return largest_first({bucket.domain for bucket in self.buckets})

    def loads(self) -> dict[int, float]:
        """Cost that each rank carries per step."""
        loads = {rank: 0.0 for domain in self.domains for rank in domain}
        for a in self.assignments:
            for owner in a.owners:
                loads[owner] += a.cost
        return loads

    def num_orthogonalized(self, rank: int) -> int:
        """Matrices that `rank` orthogonalizes per step."""
        return sum(rank in a.owners for a in self.assignments)

    def bytes_sent(self) -> dict[int, int]:
        """Bytes that each rank must send per step: exactly the pieces that have to move."""
        sent: dict[int, int] = dict.fromkeys(self.loads(), 0)
        for a in self.assignments:
            request, block = a.request, a.request.matrix.block
            itemsize = _ITEMSIZE[request.wire_dtype]
            for holder, piece in request.source.pieces(block).items():
                sent[holder] += (
                    itemsize * piece.numel * sum(o != holder for o in a.gathers_to(holder))
                )
            for holder, piece in request.target.pieces(block).items():
                for owner in a.served_by(holder):
                    sent[owner] += itemsize * piece.numel * (owner != holder)
        return sent

    def describe(self, domain: Domain) -> Description:
        """The matrices of a domain, as compared across its ranks."""
        lines = {}
        for number, bucket in enumerate(b for b in self.buckets if b.domain == domain):
            for a in bucket.assignments:
                r = a.request
                owners = ", ".join(map(str, a.owners))
                lines[str(r.matrix)] = (
                    f"shape {r.target.shape}, {r.target} on ranks {r.target.ranks}, state "
                    f"{r.source}, {r.wire_dtype}, {r.method}",
                    f"owner {owners}, bucket {number}",
                )
        return lines


def largest_first(domains: Iterable[Domain]) -> list[Domain]:
    """Order in which all ranks plan domains and make their groups."""
    return sorted(domains, key=lambda ranks: (-len(ranks), ranks))


def digest(description: Description) -> bytes:
    """SHA-256 of a description."""
    text = "\n".join(f"{key}: {', '.join(lines)}" for key, lines in description.items())
    return hashlib.sha256(text.encode()).digest()


@dataclass(slots=True)
class _Loads:
    """Running cost and bytes of each rank while owners are chosen."""

    cost: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    num_bytes: dict[int, float] = field(default_factory=lambda: defaultdict(float))


def build_plan(
    requests: Iterable[Request],
    *,
    bucket_bytes: int,
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
    loads: dict[Domain, _Loads] = {}
    buckets: list[Bucket] = []
    for domain in largest_first(by_domain):
        # Only loads that every rank of this domain knows may be carried into it.
        known = [loads[d] for d in loads if set(d) >= set(domain)]
        assignments = _assign(by_domain[domain], domain, model, known, repeat=repeat)
        loads[domain] = _loads_of(assignments)
        buckets += _fill_buckets(assignments, domain, bucket_bytes)
    return Plan(tuple(buckets))


def _assign(
    requests: Sequence[Request],
    domain: Domain,
    model: CostModel,
    known: Sequence[_Loads],
    *,
    repeat: bool,
) -> list[Assignment]:
    carried = _Loads()
    for loads in known:
        for rank in domain:
            carried.cost[rank] += loads.cost[rank]
            carried.num_bytes[rank] += loads.num_bytes[rank]
    running = _Loads(carried.cost.copy(), carried.num_bytes.copy())
    # Many matrices are of one kind.
    kinds = {(r.matrix.shape, r.steps, r.ns_dtype) for r in requests}
    cost_of = {kind: model.cost(*kind) for kind in kinds}
    costs = {r.matrix: cost_of[r.matrix.shape, r.steps, r.ns_dtype] for r in requests}
    heaviest_first = sorted(
        requests,
        key=lambda r: (-costs[r.matrix], r.method, sorted(r.matrix.shape), r.matrix.sort_key),
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
    rank: int, held: Mapping[int, Piece], running: _Loads
) -> tuple[float, float, int, int]:
    """Least loaded first; then who already holds most of the matrix."""
    numel = held[rank].numel if rank in held else 0
    return running.cost[rank], running.num_bytes[rank], -numel, rank


def _loads_of(assignments: Iterable[Assignment]) -> _Loads:
    loads = _Loads()
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


def _fill_buckets(
    assignments: Sequence[Assignment], domain: Domain, bucket_bytes: int
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
