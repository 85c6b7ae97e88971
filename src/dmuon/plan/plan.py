"""The records of a plan: pure data, the same on every rank.

Matrices are planned per *domain*, the set of ranks that store any part of them. A plan depends
on names, shapes and layouts only, never on the rank that computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dmuon.layout.layout import Layout
from dmuon.layout.matrices import Block, Matrix, Piece

if TYPE_CHECKING:
    from dmuon.newton_schulz import Method

Domain = tuple[int, ...]

_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Cargo:
    """One tensor of which pieces travel with a matrix.

    Attributes:
        key: "" for the matrix: pieces of its momentum go to the owner, pieces of the update come
            back. Else a state of one value per row or column, which goes both ways.
        source: Where pieces are gathered from. A state is laid out in elements of the wire dtype.
        target: Where pieces go back to.
        block: Where the matrix, or its part of the state, lies in them.
    """

    key: str
    source: Layout
    target: Layout
    block: Block


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
        scale: Factor on the learning rate.
        finish: What else the matrices of a batch must share: the algorithm and its options, where
            it changes the orthogonalized matrix. Then tall and wide matrices stay apart.
        rows: State of the rows or columns that travels with the matrix.
        sums: Names of what is added up over all its pieces before the step is taken; "radius",
            the first if it is one of them, must not be zero.
    """

    matrix: Matrix
    source: Layout
    target: Layout
    wire_dtype: str
    ns_dtype: str
    device_type: str
    method: Method | str
    steps: int
    scale: float = 1.0
    finish: str = ""
    rows: tuple[Cargo, ...] = ()
    sums: tuple[str, ...] = ()

    @property
    def cargo(self) -> tuple[Cargo, ...]:
        """All that travels: the matrix, then its state."""
        return Cargo("", self.source, self.target, self.matrix.block), *self.rows

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

    def gathers_to(self, cargo: Cargo, holder: int) -> list[int]:
        """Owners that take the source piece of `holder`: those in its own replica."""
        source = cargo.source
        if source.num_replicas == 1:
            return list(self.owners)
        replica = source.replica(holder)
        return [owner for owner in self.owners if source.replica(owner) == replica]

    def served_by(self, _: Cargo, holder: int) -> list[int]:
        """The owner that sends `holder` its piece of what comes back."""
        if len(self.owners) == 1:
            return [self.owners[0]]
        return [self.owners[self.request.target.replica(holder)]]


@dataclass(frozen=True, slots=True)
class Leg:
    """One piece on its way between this rank and `peer`.

    Attributes:
        peer: The other rank; this one, for a piece that it keeps.
        position: The matrix, by its place in the bucket.
        cargo: Which of the matrix's cargo.
        piece: What travels.
    """

    peer: int
    position: int
    cargo: int
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
        rank: The rank.
        held: The rank's piece of each source, by position in the bucket and number of the cargo.
        gather: Pieces on their way to the owners.
        scatter: Pieces on their way to every rank that stores them.
    """

    bucket: Bucket
    rank: int
    held: Mapping[tuple[int, int], Piece]
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
            for number, cargo in enumerate(a.request.cargo):
                piece = cargo.source.pieces(cargo.block).get(rank)
                if piece is not None:
                    held[position, number] = piece
        gather = self._route(rank, lambda cargo: cargo.source, Assignment.gathers_to)
        back = self._route(rank, lambda cargo: cargo.target, Assignment.served_by)
        return Itinerary(self, rank, held, gather, back.inverse())

    def _route(
        self,
        rank: int,
        layout_of: Callable[[Cargo], Layout],
        owners_of: Callable[[Assignment, Cargo, int], list[int]],
    ) -> Route:
        sends, receives, kept = [], [], []
        for holder, owner, leg in self._legs(rank, layout_of, owners_of):
            if holder == owner:
                kept.append(leg)
            elif holder == rank:
                sends.append(leg)
            else:
                receives.append(leg)
        moves = any(
            owner != holder
            for a in self.assignments
            for cargo in a.request.cargo
            for holder in layout_of(cargo).pieces(cargo.block)
            for owner in owners_of(a, cargo, holder)
        )
        return Route(_by_peer(sends), _by_peer(receives), tuple(kept), moves)

    def _legs(
        self,
        rank: int,
        layout_of: Callable[[Cargo], Layout],
        owners_of: Callable[[Assignment, Cargo, int], list[int]],
    ) -> Iterator[tuple[int, int, Leg]]:
        """Holder and owner of every piece that `rank` has to do with."""
        for position, a in enumerate(self.assignments):
            for number, cargo in enumerate(a.request.cargo):
                pieces = layout_of(cargo).pieces(cargo.block)
                # Only an owner deals with every holder; the others deal with their own piece.
                for holder in pieces if rank in a.owners else pieces.keys() & {rank}:
                    for owner in owners_of(a, cargo, holder):
                        if rank in (holder, owner):
                            peer = owner if holder == rank else holder
                            yield holder, owner, Leg(peer, position, number, pieces[holder])


def _by_peer(legs: list[Leg]) -> tuple[Leg, ...]:
    return tuple(sorted(legs, key=lambda leg: (leg.peer, leg.cargo, leg.position)))


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
            itemsize = _ITEMSIZE[a.request.wire_dtype]
            for cargo in a.request.cargo:
                for holder, piece in cargo.source.pieces(cargo.block).items():
                    others = sum(owner != holder for owner in a.gathers_to(cargo, holder))
                    sent[holder] += itemsize * piece.numel * others
                for holder, piece in cargo.target.pieces(cargo.block).items():
                    for owner in a.served_by(cargo, holder):
                        sent[owner] += itemsize * piece.numel * (owner != holder)
        return sent


def largest_first(domains: Iterable[Domain]) -> list[Domain]:
    """Order in which all ranks plan domains and make their groups."""
    return sorted(domains, key=lambda ranks: (-len(ranks), ranks))
