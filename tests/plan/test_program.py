"""Every rank's program, carried out in NumPy without ranks: what is pasted, sent and cut."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from dmuon.layout.matrices import Block, matrices_of
from dmuon.plan.batches import batch_shapes
from dmuon.plan.build import build_plan
from dmuon.plan.cost import Timings
from dmuon.plan.plan import Cargo, Request
from dmuon.plan.program import program_of
from tests.layout.test_layout import Case
from tests.layout.test_matrices import view_of
from tests.plan.test_copies import carry_out
from tests.plan.test_plan import layouts

ROWS = "second_moment_rows"
ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Weight:
    """A parameter of a test.

    `source` is where its momentum lies, `target` where it lies itself, and `rows`, if it has any,
    where the state of its rows lies, in elements of the wire's dtype.
    """

    fqn: str
    source: Case
    target: Case
    rows: Case | None = None
    flatten: bool = False
    split: tuple[tuple[int, ...], int] | None = None
    wire: str = "float32"

    @property
    def requests(self):
        matrices = matrices_of(self.fqn, self.target.shape, flatten=self.flatten, split=self.split)
        return [
            Request(
                matrix,
                self.source.layout,
                self.target.layout,
                wire_dtype=self.wire,
                ns_dtype=self.wire,
                device_type="cpu",
                method="ns",
                steps=5,
                finish="normuon" if self.rows else "",
                rows=(self._cargo(matrix),) if self.rows else (),
            )
            for matrix in matrices
        ]

    def _cargo(self, matrix):
        """The rows of a matrix; blocks of columns have theirs side by side."""
        layout = self.rows.layout
        width = 4 // ITEMSIZE[self.wire]
        sizes, dim = self.split or ((), 0)
        number = [0, *itertools.accumulate(sizes)].index(matrix.block.cols[0]) if dim else 0
        cols = (number * width, (number + 1) * width)
        return Cargo(ROWS, layout, layout, Block(matrix.block.batch, matrix.block.rows, cols))

    def cases(self, key):
        """Where something is gathered from, and where it goes back to."""
        return (self.rows, self.rows) if key else (self.source, self.target)


def with_rows(weight):
    """The same parameter with state of its rows, laid out as `dmuon.state.initial` does."""
    shape = weight.source.shape
    row_dim = 0 if weight.flatten else len(shape) - 2
    sizes, dim = weight.split or ((), 0)
    width = (len(sizes) if dim else 1) * 4 // ITEMSIZE[weight.wire]
    placements = tuple(
        p if getattr(p, "dim", len(shape)) <= row_dim else Replicate()
        for p in weight.source.placements
    )
    shape = (*shape[: row_dim + 1], width)
    return replace(weight, rows=replace(weight.source, shape=shape, placements=placements))


@st.composite
def splits(draw, length):
    """Sizes of blocks that add up to `length`, or None."""
    cuts = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=3)))
    borders = [0, *(cut for cut in cuts if cut < length), length]
    return tuple(b - a for a, b in itertools.pairwise(borders)) if len(borders) > 2 else None


@st.composite
def weights(draw, max_weights=4):
    """Parameters of all kinds on random layouts: stacks, convolutions, fused ones, with state."""
    found = []
    for i in range(draw(st.integers(1, max_weights))):
        ndim = draw(st.sampled_from([2, 2, 2, 3, 3, 4]))
        shape = tuple(draw(st.integers(1, 12 if ndim == 2 else 5)) for _ in range(ndim))
        target = source = draw(layouts(shape))
        if all(p.is_replicate() for p in target.placements) and draw(st.booleans()):
            mesh = (len(target.ranks),)
            source = replace(target, mesh=mesh, placements=(Shard(0),))
        flatten = ndim > 2 and draw(st.booleans())
        dim = draw(st.integers(0, 1)) if not flatten else 0
        sizes = draw(splits(shape[0] if flatten else shape[ndim - 2 + dim]))
        split = (sizes, dim) if sizes else None
        wire = draw(st.sampled_from(["float32", "bfloat16"]))
        weight = Weight(f"p{i}", source, target, None, flatten, split, wire)
        # A second of the same kind shares batches and copies with it.
        twins = [weight, replace(weight, fqn=f"p{i}b")][: draw(st.integers(1, 2))]
        found += [with_rows(twin) for twin in twins] if draw(st.booleans()) else twins
    return found


def by_shape(request, shapes):
    """What shares a stack where nothing has been measured."""
    return batch_shapes(shapes, Timings(), dtype=request.ns_dtype, steps=request.steps)


def all_padded(request, shapes):
    """One stack for all shapes, padded, but for those that a later stage reads."""
    if request.finish:
        return by_shape(request, shapes)
    small, large = (max(sides) for sides in zip(*map(sorted, shapes), strict=True))
    return [((small, large), range(len(shapes)))]


class Job:
    """All ranks of a plan; `wholes` are the tensors they store pieces of, of distinct numbers."""

    def __init__(self, found, plan, stacking):
        self.weights = {weight.fqn: weight for weight in found}
        self.plan, self.stacking = plan, stacking
        self.wholes, first = {}, 1
        for weight in found:
            for key, case in {"": weight.target, ROWS: weight.rows}.items():
                if case is not None:
                    size = math.prod(case.shape)
                    numbers = np.arange(first, first + size, dtype=float)
                    self.wholes[weight.fqn, key] = numbers.reshape(case.shape)
                    first += size
        # How often each element that a rank stores was taken, and was written.
        self.taken, self.written = Counter(), Counter()
        self.sent = Counter()

    def stored(self, rank, slab, side):
        """What a rank stores of a slab."""
        case = self.weights[slab.fqn].cases(slab.key)[side]
        local = self.wholes[slab.fqn, slab.key].reshape(-1)[case.stored_by(rank).numpy()]
        part = local[slab.index] if slab.index else local
        assert part.shape == slab.shape
        return part

    def count(self, counter, rank, slab, side):
        """Count the numbers of a slab as seen."""
        counter.update((rank, number) for number in self.stored(rank, slab, side).ravel().tolist())

    def inputs(self, rank, program):
        for slab in (*program.idle, *program.inputs.slabs):
            self.count(self.taken, rank, slab, 0)
        return flat([self.stored(rank, slab, 0) for slab in program.inputs.slabs], program.inputs)

    def check(self, rank, slabs, buffer):
        """What came back must be what the rank stores there."""
        for slab in slabs.slabs:
            self.count(self.written, rank, slab, 1)
        expected = flat([self.stored(rank, slab, 1) for slab in slabs.slabs], slabs)
        np.testing.assert_array_equal(buffer, expected)

    def stored_numbers(self, side):
        """Every number that any rank stores, once."""
        return Counter(
            (rank, number)
            for (fqn, key), whole in self.wholes.items()
            for case in [self.weights[fqn].cases(key)[side]]
            for rank in case.ranks
            for number in whole.reshape(-1)[case.stored_by(rank).numpy()].ravel().tolist()
        )

    def run(self):
        for bucket in self.plan.buckets:
            programs = {
                rank: program_of(bucket.itinerary(rank), self.stacking) for rank in bucket.domain
            }
            self.run_bucket(bucket, programs)

    def run_bucket(self, bucket, programs):
        inputs = {rank: self.inputs(rank, program) for rank, program in programs.items()}
        outboxes = {
            rank: filled(program.gather.num_sent, [(inputs[rank], program.pack)])
            for rank, program in programs.items()
        }
        inboxes = self.exchange(bucket, {r: p.gather for r, p in programs.items()}, outboxes)
        results = {
            rank: [
                {
                    key: filled(
                        math.prod(stack.shape),
                        [(inboxes[rank], stack.received), (inputs[rank], stack.kept)],
                        gaps=0.0 if batch.is_padded else np.nan,
                    )
                    for key, stack in batch.stacks.items()
                }
                for batch in program.batches
            ]
            for rank, program in programs.items()
        }
        for rank, program in programs.items():
            self.check_stacks(rank, program, results[rank])
        outboxes = {
            rank: filled(program.scatter.num_sent, ways(program, results[rank], "sent"))
            for rank, program in programs.items()
        }
        inboxes = self.exchange(bucket, {r: p.scatter for r, p in programs.items()}, outboxes)
        for rank, program in programs.items():
            stays = filled(program.stays.numel, ways(program, results[rank], "stays"))
            self.check(rank, program.stays, stays)
            sources = [(inboxes[rank], program.unpack), *ways(program, results[rank], "arrives")]
            self.check(rank, program.arrivals, filled(program.arrivals.numel, sources))

    def exchange(self, bucket, transfers, outboxes):
        """All-to-all with the split sizes of the transfers."""
        place = {rank: i for i, rank in enumerate(bucket.domain)}
        for r, s in itertools.product(bucket.domain, repeat=2):
            assert transfers[r].send_splits[place[s]] == transfers[s].receive_splits[place[r]]
            assert r != s or transfers[r].send_splits[place[s]] == 0
        moves = any(transfer.num_sent for transfer in transfers.values())
        assert {transfer.moves for transfer in transfers.values()} == {moves}
        parts = {
            rank: np.split(outboxes[rank], np.cumsum(transfers[rank].send_splits)[:-1])
            for rank in bucket.domain
        }
        for rank in bucket.domain:
            self.sent[rank] += ITEMSIZE[bucket.wire_dtype] * transfers[rank].num_sent
        return {s: np.concatenate([parts[r][place[s]] for r in place]) for s in place}

    def check_stacks(self, rank, program, stacks):
        """The stacks hold the whole matrices that the rank owns, wide, and their state."""
        owned = {}
        for a in program.bucket.assignments:
            if rank in a.owners:
                fqn, block = a.request.matrix.fqn, a.request.matrix.block
                matrix = view_of_array(self.wholes[fqn, ""], block)
                rows = [view_of_array(self.wholes[fqn, c.key], c.block) for c in a.request.rows]
                owned[matrix.flat[0]] = a.request, matrix, rows
        for batch, found in zip(program.batches, stacks, strict=True):
            num, m, n = batch.stacks[""].shape
            assert m <= n
            for b in range(num):
                stacked = found[""].reshape(num, m, n)[b]
                request, matrix, rows = owned.pop(stacked[0, 0])
                is_tall = matrix.shape[0] > matrix.shape[1]
                wide = matrix.T if is_tall else matrix
                assert request.method == batch.request.method
                padding = np.zeros((m, n))
                padding[: wide.shape[0], : wide.shape[1]] = wide
                np.testing.assert_array_equal(stacked, padding)
                assert batch.is_padded or wide.shape == (m, n)
                assert not request.finish or batch.is_tall == is_tall
                for cargo, state in zip(request.rows, rows, strict=True):
                    shape = batch.stacks[cargo.key].shape
                    assert shape == (num, *state.shape)
                    np.testing.assert_array_equal(found[cargo.key].reshape(shape)[b], state)
        assert not owned


def view_of_array(array, block):
    """The matrix that a block selects from a whole tensor."""
    return view_of(Flattening(array), block)


class Flattening:
    """An array that `view_of` can flatten as it does a tensor."""

    def __init__(self, array):
        self.array = array

    def flatten(self, dim):
        assert dim == 1
        return self.array.reshape(len(self.array), -1)

    def __getitem__(self, index):
        return self.array[index]


def flat(parts, slabs):
    """Parts one behind the other; runs must say where they lie."""
    buffer = np.concatenate([part.ravel() for part in parts]) if parts else np.empty(0)
    assert len(buffer) == slabs.numel
    for run in slabs.runs:
        run_parts = parts[run.start : run.stop]
        assert {part.shape for part in run_parts} == {run.shape}
        assert {slab.key for slab in slabs.slabs[run.start : run.stop]} == {run.key}
        run_values = np.concatenate([part.ravel() for part in run_parts])
        np.testing.assert_array_equal(buffer[run.first : run.last], run_values)
    assert sum(run.stop - run.start for run in slabs.runs) == len(parts)
    return buffer


def filled(numel, sources, gaps=np.nan):
    """A buffer after copies; what none of them writes is `gaps`."""
    buffer = np.full(numel, gaps)
    for source, copies in sources:
        carry_out(copies, buffer, source)
    assert not np.isnan(buffer).any()
    return buffer


def ways(program, results, way):
    """Results with the copies that take them one way."""
    return [
        (result, getattr(batch.stacks[key], way))
        for batch, found in zip(program.batches, results, strict=True)
        for key, result in found.items()
    ]


def run_job(found, *, bucket_bytes=2**20, repeat=False, stacking=by_shape):
    requests = [request for weight in found for request in weight.requests]
    plan = build_plan(requests, bucket_bytes=bucket_bytes, repeat=repeat)
    job = Job(found, plan, stacking)
    job.run()
    return job


@given(
    weights(),
    st.integers(1, 2048),
    st.booleans(),
    st.sampled_from([by_shape, all_padded]),
)
def test_every_rank_gets_its_piece_of_every_matrix_and_state(found, bucket_bytes, repeat, stacking):
    job = run_job(found, bucket_bytes=bucket_bytes, repeat=repeat, stacking=stacking)
    # Each element of momentum is advanced once, and each element of the weights and states gets
    # its update once, on every rank that stores it.
    assert job.taken == job.stored_numbers(0)
    assert job.written == job.stored_numbers(1)
    assert {rank: job.sent[rank] for rank in job.plan.loads()} == job.plan.bytes_sent()


@given(weights(max_weights=2), st.data())
def test_parameters_without_gradients_are_left_out(found, data):
    absent = data.draw(st.sets(st.sampled_from([weight.fqn for weight in found])))
    job = run_job(found)
    for bucket in job.plan.buckets:
        rest = bucket.without(frozenset(absent))
        for rank in rest.domain if rest.assignments else ():
            program = program_of(rest.itinerary(rank), by_shape)
            slabs = (*program.idle, *program.inputs.slabs, *program.arrivals.slabs)
            assert absent.isdisjoint(slab.fqn for slab in (*slabs, *program.stays.slabs))
    left = [weight for weight in found if weight.fqn not in absent]
    if left:
        run_job(left)


# What grows with the number of equal matrices


def num_copies(program):
    """Copies and slices that a step carries out, and slabs of which it does not need a list."""
    stacks = [stack for batch in program.batches for stack in batch.stacks.values()]
    lists = [getattr(s, way) for s in stacks for way in ("received", "kept", "sent", "stays")]
    lists += [stack.arrives for stack in stacks] + [program.pack, program.unpack]
    flats = (program.inputs, program.stays, program.arrivals)
    return sum(map(len, lists)) + sum(len(flat.runs) for flat in flats) + len(stacks)


def case(shape, mesh, *placements):
    return Case(shape, mesh, tuple(range(math.prod(mesh))), placements, 0)


def equal(num, laid_out, **options):
    return [Weight(f"p{i:03}", laid_out, laid_out, **options) for i in range(num)]


def fsdp(num, shape, world, **options):
    return equal(num, case(shape, (world,), Shard(0)), **options)


LAYOUTS = {
    "FSDP2": lambda num: fsdp(num, (8, 6), 4),
    "FSDP2, tall and wide": lambda num: [
        *fsdp(num, (8, 4), 4),
        *(replace(weight, fqn=f"wide {weight.fqn}") for weight in fsdp(num, (4, 8), 4)),
    ],
    "FSDP2, uneven": lambda num: fsdp(num, (5, 6), 4),
    "HSDP": lambda num: equal(num, case((8, 6), (2, 2), Replicate(), Shard(0))),
    "row-parallel": lambda num: equal(num, case((8, 8), (4,), Shard(1))),
    "DDP": lambda num: equal(num, case((8, 6), (4,), Replicate())),
    "experts, Shard(1)": lambda num: equal(1, case((num, 8, 6), (4,), Shard(1))),
    "whole experts": lambda num: equal(1, case((num, 8, 6), (4,), Shard(0))),
    "rows of state": lambda num: [with_rows(weight) for weight in fsdp(num, (8, 6), 4)],
    "rows of state in bfloat16": lambda num: [
        with_rows(weight) for weight in fsdp(num, (8, 6), 4, wire="bfloat16")
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_do_not_grow_with_the_number_of_equal_matrices(layout):
    counts = []
    for num in (16, 32, 128):
        job = run_job(LAYOUTS[layout](num))
        (bucket,) = job.plan.buckets
        ranks = bucket.domain
        counts.append([num_copies(program_of(bucket.itinerary(rank), by_shape)) for rank in ranks])
    assert counts[0] == counts[1] == counts[2]
    # Of each shape and kind of state a handful for each other rank.
    assert max(counts[0]) <= 48


@pytest.mark.parametrize("world", [2, 4, 16])
def test_copies_of_even_shards_do_not_grow_with_the_number_of_ranks(world):
    job = run_job(fsdp(2 * world, (world, 6), world))
    (bucket,) = job.plan.buckets
    programs = [program_of(bucket.itinerary(rank), by_shape) for rank in bucket.domain]
    # Before and behind the owner's own rows, which do not travel.
    assert max(map(num_copies, programs)) <= 12
    for program in programs:
        assert len(program.pack) <= 2
        assert all(len(batch.stacks[""].received) <= 2 for batch in program.batches)
