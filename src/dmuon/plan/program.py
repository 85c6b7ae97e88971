"""What one rank does with a bucket, in flat buffers: everything that is known before a step.

```text
slabs -> inputs --copies--> outbox ==exchange==> inbox --copies--> stack --orthogonalize--> result
result --copies--> outbox ==exchange==> inbox --copies--> arrivals -> slabs
```

What a rank keeps goes straight from inputs to stack and from result to `stays`. A buffer that
another one would repeat is that one: see `copies.contiguous`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dmuon.layout.matrices import Piece, Runs
from dmuon.plan.copies import Copy, merge
from dmuon.plan.plan import Bucket, Domain, Itinerary, Leg, Request, Route

Shape = tuple[int, ...]
# Which of some shapes are stacked, and in which wide shape; see `dmuon.plan.batches`.
Stacking = Callable[
    [Request, Sequence[tuple[int, int]]], Sequence[tuple[tuple[int, int], Sequence[int]]]
]


@dataclass(frozen=True, slots=True)
class Slab:
    """What a rank stores of the matrices of one parameter in a bucket; mostly a local tensor.

    Attributes:
        fqn: The parameter.
        key: "" for the parameter and its momentum, else a state.
        index: Selects it from the local tensor; () is all of it.
        shape: Its shape.
        scale: Factor on the learning rate.
        position: Of the matrix that it is a piece of, where something is added up over matrices.
        is_counted: Whether this rank adds it: one of those that have a copy of it does.
    """

    fqn: str
    key: str
    index: tuple[int | slice, ...]
    shape: Shape
    scale: float
    position: int | None = None
    is_counted: bool = False

    @property
    def numel(self) -> int:
        """Number of elements, of the wire dtype."""
        return math.prod(self.shape)


class Run(NamedTuple):
    """Neighbors of one shape in a `Flat`: slabs `start:stop`, elements `first:last`."""

    start: int
    stop: int
    first: int
    last: int
    key: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Flat:
    """Slabs one behind the other in one buffer of `numel` elements."""

    slabs: tuple[Slab, ...]
    runs: tuple[Run, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One exchange as this rank takes part in it; split sizes in the order of the domain."""

    moves: bool
    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]

    @property
    def num_sent(self) -> int:
        """Elements that this rank sends."""
        return sum(self.send_splits)

    @property
    def num_received(self) -> int:
        """Elements that this rank receives."""
        return sum(self.receive_splits)


@dataclass(frozen=True, slots=True)
class Stack:
    """One cargo of a batch: how its stack is filled, and where the result goes.

    Attributes:
        shape: (B, m, n) with m <= n for matrices; (B, rows, elements) for a state.
        received: Inbox to stack.
        kept: Inputs to stack.
        sent: Result to outbox.
        stays: Result to `Program.stays`.
        arrives: Result to `Program.arrivals`.
    """

    shape: tuple[int, int, int]
    received: tuple[Copy, ...]
    kept: tuple[Copy, ...]
    sent: tuple[Copy, ...]
    stays: tuple[Copy, ...]
    arrives: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices that are orthogonalized in one call.

    Attributes:
        request: The first of them, which stands for all.
        is_tall: The stack holds transposes of all matrices; said only where `Request.finish` is.
        is_padded: Some matrix is smaller than its place in the stack.
        stacks: Its cargo: the matrices, and state that travels with them by key.
    """

    request: Request
    is_tall: bool
    is_padded: bool
    stacks: Mapping[str, Stack]


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's part in a bucket.

    Attributes:
        bucket: The bucket.
        idle: Slabs whose momentum advances here and is gathered from another replica.
        inputs: Slabs of which something is orthogonalized.
        gather: The exchange to the owners.
        pack: Inputs to outbox.
        batches: What this rank orthogonalizes.
        scatter: The exchange back.
        unpack: Inbox to arrivals.
        stays: Slabs whose update is all made here.
        arrivals: The other slabs.
    """

    bucket: Bucket
    idle: tuple[Slab, ...]
    inputs: Flat
    gather: Transfer
    pack: tuple[Copy, ...]
    batches: tuple[Batch, ...]
    scatter: Transfer
    unpack: tuple[Copy, ...]
    stays: Flat
    arrivals: Flat

    @property
    def num_matrices(self) -> int:
        """Matrices that this rank orthogonalizes."""
        return sum(batch.stacks[""].shape[0] for batch in self.batches)

    @property
    def num_sums(self) -> int:
        """Numbers that are added up for each matrix."""
        return max(len(a.request.sums) for a in self.bucket.assignments)


class _Place(NamedTuple):
    """Where a piece lies in a flat buffer, by its own coordinates or by those of its matrix."""

    offset: int
    row_stride: int
    col_stride: int
    by_matrix: bool = False


# Where one side of an exchange has the piece of a leg; None where it has it not.
_Places = Callable[[Leg], _Place | None]
# Makes the stack of a cargo by number, of a shape, with the slots of its matrices by position.
_MakeStack = Callable[[int, tuple[int, int, int], Mapping[int, _Place]], Stack]
# A piece that this rank stores: position in the bucket, number of the cargo, and the piece.
_Held = tuple[int, int, Piece]


@dataclass(frozen=True, slots=True)
class _Group:
    """A slab with the pieces it is made of, and the ranks that those come from or go to."""

    slab: Slab
    pieces: list[_Held]
    peers: frozenset[int]


def program_of(itinerary: Itinerary, stacking: Stacking) -> Program:
    """Lay out the flat buffers of an itinerary.

    Args:
        itinerary: One rank's part in a bucket.
        stacking: Says which matrices of equal method share a batch.
    """
    domain, gather, scatter = itinerary.bucket.domain, itinerary.gather, itinerary.scatter
    sources = _groups(itinerary, itinerary.held, "source", (*gather.sends, *gather.kept))
    inputs, in_inputs = _flat([group for group in sources if group.peers])
    back = (*scatter.receives, *scatter.kept)
    stored = {(leg.position, leg.cargo): leg.piece for leg in back}
    targets = _groups(itinerary, stored, "target", back)
    stays, in_stays = _flat([group for group in targets if group.peers == {itinerary.rank}])
    arrivals, in_arrivals = _flat([group for group in targets if group.peers != {itinerary.rank}])
    inbox, outbox = _wire(gather.receives), _wire(scatter.sends)

    def stack(number: int, shape: tuple[int, int, int], slots: Mapping[int, _Place]) -> Stack:
        def slot(leg: Leg) -> _Place | None:
            return slots.get(leg.position) if leg.cargo == number else None

        return Stack(
            shape,
            received=_join(gather.receives, inbox, slot),
            kept=_join(gather.kept, in_inputs, slot),
            sent=_join(scatter.sends, slot, outbox),
            stays=_join(scatter.kept, slot, in_stays),
            arrives=_join(scatter.kept, slot, in_arrivals),
        )

    return Program(
        itinerary.bucket,
        idle=tuple(group.slab for group in sources if not group.peers),
        inputs=inputs,
        gather=_transfer(gather, domain),
        pack=_join(gather.sends, in_inputs, _wire(gather.sends)),
        batches=tuple(_batches(itinerary, stacking, stack)),
        scatter=_transfer(scatter, domain),
        unpack=_join(scatter.receives, _wire(scatter.receives), in_arrivals),
        stays=stays,
        arrivals=arrivals,
    )


def _groups(
    itinerary: Itinerary,
    held: Mapping[tuple[int, int], Piece],
    side: Literal["source", "target"],
    legs: Sequence[Leg],
) -> list[_Group]:
    """The slabs of one side, in the order in which their first pieces travel; what stays, last."""
    peers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for leg in legs:
        peers[leg.position, leg.cargo].add(leg.peer)
    by_tensor: dict[tuple[str, str], list[_Held]] = defaultdict(list)
    for position, number in sorted(held):
        request = itinerary.bucket.assignments[position].request
        cargo = request.cargo[number]
        by_tensor[request.matrix.fqn, cargo.key].append((position, number, held[position, number]))
    groups = [
        _Group(slab, members, frozenset().union(*(peers[m[:2]] for m in members)))
        for pieces in by_tensor.values()
        for slab, members in _slabs(itinerary, pieces, side)
    ]
    away = {itinerary.rank: math.inf}
    return sorted(
        groups,
        key=lambda g: (
            min((away.get(peer, peer) for peer in g.peers), default=math.inf),
            *g.pieces[0][1::-1],
        ),
    )


def _slabs(
    itinerary: Itinerary, pieces: list[_Held], side: Literal["source", "target"]
) -> Iterator[tuple[Slab, list[_Held]]]:
    """The whole local tensor where the bucket has all of it at one scale; else piece by piece."""
    requests = {p: itinerary.bucket.assignments[p].request for p, _, _ in pieces}
    position, number, _ = pieces[0]
    request = requests[position]
    cargo = request.cargo[number]
    layout = cargo.source if side == "source" else cargo.target
    shape = layout.local_shape(itinerary.rank)
    is_whole = sum(piece.numel for *_, piece in pieces) == math.prod(shape)
    is_alike = len({r.scale for r in requests.values()}) == 1 and not request.sums
    if is_whole and (side == "source" or is_alike):
        yield Slab(request.matrix.fqn, cargo.key, (), shape, request.scale), pieces
        return
    for position, number, piece in pieces:
        request = requests[position]
        num_batch = len(request.cargo[number].block.batch)
        tail = shape[num_batch + 1 :] if request.cargo[number].block.flatten else piece.shape[1:]
        slab_shape = (piece.shape[0], *tail)
        is_counted = request.target.replica(itinerary.rank) == 0
        slab = Slab(
            *(request.matrix.fqn, cargo.key, piece.index, slab_shape, request.scale),
            *((position, is_counted) if request.sums and not cargo.key else ()),
        )
        yield slab, [(position, number, piece)]


def _flat(groups: Sequence[_Group]) -> tuple[Flat, _Places]:
    """Slabs one behind the other, and where the pieces in them lie."""
    places: dict[tuple[int, int], _Place] = {}
    runs: list[Run] = []
    offset = 0
    for i, group in enumerate(groups):
        slab = group.slab
        for position, number, piece in group.pieces:
            places[position, number] = _place_in(slab, piece, offset)
        if runs and (runs[-1].key, runs[-1].shape) == (slab.key, slab.shape):
            runs[-1] = runs[-1]._replace(stop=i + 1, last=offset + slab.numel)
        else:
            runs.append(Run(i, i + 1, offset, offset + slab.numel, slab.key, slab.shape))
        offset += slab.numel
    flat = Flat(tuple(g.slab for g in groups), tuple(runs), offset)
    return flat, lambda leg: places.get((leg.position, leg.cargo))


def _place_in(slab: Slab, piece: Piece, offset: int) -> _Place:
    """Where a piece lies in a slab that starts at `offset`."""
    if slab.index:
        return _Place(offset, piece.shape[1], 1)
    row_dim = sum(isinstance(at, int) for at in piece.index)
    for dim, at in enumerate(piece.index):
        first = at.start if isinstance(at, slice) else at
        offset += first * math.prod(slab.shape[dim + 1 :])
    return _Place(offset, math.prod(slab.shape[row_dim + 1 :]), 1)


def _wire(legs: Sequence[Leg]) -> _Places:
    """Where pieces lie that travel one behind the other."""
    stops = itertools.accumulate((leg.piece.numel for leg in legs), initial=0)
    places = {
        (leg.peer, leg.position, leg.cargo): _Place(offset, leg.piece.shape[1], 1)
        for leg, offset in zip(legs, stops, strict=False)
    }
    return lambda leg: places.get((leg.peer, leg.position, leg.cargo))


def _join(legs: Iterable[Leg], source: _Places, target: _Places) -> tuple[Copy, ...]:
    """Copies of the pieces that both sides have."""
    return merge(
        copy
        for leg in legs
        if (there := source(leg)) is not None and (here := target(leg)) is not None
        for copy in _copies(leg.piece, there, here)
    )


def _copies(piece: Piece, source: _Place, target: _Place) -> Iterator[Copy]:
    """Copies of the rectangles of a piece, which in its matrix may lie apart."""
    for rows in _spans(piece.rows):
        for cols in _spans(piece.cols):
            offsets = [
                place.offset
                + rows[place.by_matrix] * place.row_stride
                + cols[place.by_matrix] * place.col_stride
                for place in (source, target)
            ]
            shape = (rows[2], cols[2])
            strides = [(place.row_stride, place.col_stride) for place in (source, target)]
            yield Copy(shape, offsets[0], strides[0], offsets[1], strides[1])


def _spans(runs: Runs) -> Iterator[tuple[int, int, int]]:
    """For each run, where it starts in the piece and in the matrix, and its length."""
    position = 0
    for start, stop in runs:
        yield position, start, stop - start
        position += stop - start


def _transfer(route: Route, domain: Domain) -> Transfer:
    splits = []
    for legs in (route.sends, route.receives):
        numel = dict.fromkeys(domain, 0)
        for leg in legs:
            numel[leg.peer] += leg.piece.numel
        splits.append(tuple(numel.values()))
    return Transfer(route.moves, *splits)


def _batches(
    itinerary: Itinerary,
    stacking: Stacking,
    stack: _MakeStack,
) -> Iterator[Batch]:
    """Stack what this rank owns: equal methods and shapes together, the longer side along rows."""
    kinds: dict[Hashable, list[int]] = defaultdict(list)
    for position, a in enumerate(itinerary.bucket.assignments):
        if itinerary.rank in a.owners:
            kinds[_kind(a.request)].append(position)
    for members in kinds.values():
        requests = [itinerary.bucket.assignments[p].request for p in members]
        for shape, indices in stacking(requests[0], [r.matrix.shape for r in requests]):
            chosen = {members[i]: requests[i] for i in sorted(indices)}
            yield _batch(chosen, shape, stack)


def _batch(requests: Mapping[int, Request], shape: tuple[int, int], stack: _MakeStack) -> Batch:
    """A batch of requests, by position, in a wide shape."""
    m, n = shape
    first = next(iter(requests.values()))
    slots = {
        position: _Place(b * m * n, *((1, n) if _is_tall(r) else (n, 1)), by_matrix=True)
        for b, (position, r) in enumerate(requests.items())
    }
    stacks = {"": stack(0, (len(requests), m, n), slots)}
    for number, cargo in enumerate(first.rows, start=1):
        rows, width = cargo.block.shape
        slots = {p: _Place(b * rows * width, width, 1, True) for b, p in enumerate(requests)}
        stacks[cargo.key] = stack(number, (len(requests), rows, width), slots)
    is_padded = any(sorted(r.matrix.shape) != [m, n] for r in requests.values())
    return Batch(first, _is_tall(first), is_padded, stacks)


def _kind(request: Request) -> Hashable:
    """What matrices of one call have in common besides their shape."""
    if request.finish:
        return request.method, request.finish, _is_tall(request)
    return request.method


def _is_tall(request: Request) -> bool:
    rows, cols = request.matrix.shape
    return rows > cols
