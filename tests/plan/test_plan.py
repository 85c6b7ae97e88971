"""The planner, without processes: ownership, balance, buckets, bytes and routes."""

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dmuon.layout.layout import Layout, Sharding, single_rank
from dmuon.layout.matrices import matrices_of
from dmuon.plan.build import build_plan
from dmuon.plan.cost import CostModel, newton_schulz_flops
from dmuon.plan.fingerprint import describe, digest
from dmuon.plan.plan import Plan, Request
from tests.layout.test_layout import Case

MIB = 2**20
ROWS = (Sharding(0),)


def requests_of(fqn, shape, layout, **options):
    """The requests of one parameter."""
    split = options.pop("split", None)
    dtypes = {"wire_dtype": "float32", "ns_dtype": "float32"}
    options = dtypes | {"device_type": "cpu", "method": "ns", "steps": 5} | options
    source = options.pop("source", layout)
    return [
        Request(matrix, source, layout, **options)
        for matrix in matrices_of(fqn, shape, split=split)
    ]


def fsdp(shapes, world, ranks=None, name="p", **options):
    """Requests of parameters of these shapes, `Shard(0)` over a 1-D mesh."""
    ranks = tuple(ranks or range(world))
    return [
        request
        for i, shape in enumerate(shapes)
        for request in requests_of(
            f"{name}{i}", shape, Layout(shape, (world,), ranks, ROWS), **options
        )
    ]


def plan_of(requests, bucket_bytes=MIB, **options):
    return build_plan(requests, bucket_bytes=bucket_bytes, **options)


def imbalance(plan):
    loads = plan.loads().values()
    return max(loads) * len(loads) / sum(loads)


def names(plan):
    return Counter(str(a.request.matrix) for a in plan.assignments)


SHAPES = st.tuples(st.integers(1, 24), st.integers(1, 24))


@st.composite
def layouts(draw, shape):
    """A layout on up to 8 of 10 ranks, in torch's terms."""
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 2), (2, 2, 2)]))
    dims = st.integers(0, len(shape) - 1)
    placement = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(lambda dim: _StridedShard(dim, split_factor=2), dims),
    )
    # Not all from rank 0: domains may overlap without one holding the other.
    first = draw(st.integers(0, 2))
    ranks = tuple(range(first, first + math.prod(mesh)))
    return Case(shape, mesh, ranks, tuple(draw(placement) for _ in mesh), first)


@dataclass(frozen=True)
class Laid:
    """A parameter of a test; `source` is where its momentum lies, `target` where it lies itself."""

    fqn: str
    source: Case
    target: Case
    requests: list[Request]


@st.composite
def laid_out(draw, max_params=5):
    """A few parameters on random layouts, some with their momentum sharded (ZeRO-1)."""
    params = []
    for i in range(draw(st.integers(1, max_params))):
        shape = draw(SHAPES)
        target = source = draw(layouts(shape))
        if all(p.is_replicate() for p in target.placements) and draw(st.booleans()):
            world = len(target.ranks)
            source = Case(shape, (world,), target.ranks, (Shard(0),), target.rank)
        wire = draw(st.sampled_from(["float32", "bfloat16"]))
        options = {"source": source.layout, "wire_dtype": wire}
        requests = requests_of(f"p{i}", shape, target.layout, **options)
        params.append(Laid(f"p{i}", source, target, requests))
    return params


def all_requests(params):
    return [request for param in params for request in param.requests]


@given(laid_out(), st.integers(1, 4096), st.booleans())
def test_every_matrix_is_owned_once_by_a_rank_that_stores_part_of_it(params, bucket_bytes, repeat):
    requests = all_requests(params)
    plan = plan_of(requests, bucket_bytes, repeat=repeat)
    assert names(plan) == Counter(str(request.matrix) for request in requests)
    for a in plan.assignments:
        assert set(a.owners) <= set(a.request.candidates)
        assert len(a.owners) == (a.request.target.num_replicas if repeat else 1)
    assert sum(plan.loads().values()) == pytest.approx(
        sum(a.cost * len(a.owners) for a in plan.assignments)
    )


@given(laid_out(), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_the_requests(params, shuffler):
    requests = all_requests(params)
    plan = plan_of(requests, 512)
    shuffler.shuffle(requests)
    assert plan_of(requests, 512) == plan


def example_fingerprints():
    """A hash of this process, and the fingerprints of a plan with many ties, by domain."""
    requests = fsdp([(8, 8)] * 6 + [(4, 8)] * 5, 4)
    requests += fsdp([(8, 8)] * 3, 2, ranks=(1, 3), name="q", wire_dtype="bfloat16")
    hybrid = Layout((8, 8), (2, 2), (0, 1, 2, 3), (None, Sharding(0)))
    requests += requests_of("r", (8, 8), hybrid, split=((2, 3, 3), 0))
    # Through a set: its order depends on the hash seed.
    plan = plan_of(list(set(requests)), 256)
    return hash("dmuon"), {domain: digest(describe(plan, domain)) for domain in plan.domains}


def test_plan_does_not_depend_on_the_hash_seed(run_ranks):
    here, fingerprints = example_fingerprints()
    ((there, other),) = run_ranks(1, example_fingerprints)
    if here == there:
        pytest.skip("PYTHONHASHSEED is set, so that all processes hash alike")
    assert other == fingerprints
    assert len(fingerprints) == 2


@given(laid_out(), st.integers(0, 9))
def test_a_rank_plans_its_own_domains_without_knowing_the_others(params, rank):
    requests = all_requests(params)
    everything = plan_of(requests, 512)
    mine = plan_of([r for r in requests if rank in r.domain], 512)
    for domain in mine.domains:
        assert digest(describe(mine, domain)) == digest(describe(everything, domain))
        assert describe(mine, domain) == describe(everything, domain)
    assert mine.domains == [domain for domain in everything.domains if rank in domain]


@pytest.mark.parametrize(
    "change",
    [
        {"wire_dtype": "bfloat16"},
        {"method": "other"},
        {"split": ((2, 6), 0)},
        {"source": Layout((8, 8), (2,), (0, 1), (Sharding(1),))},
    ],
)
def test_fingerprint_sees_everything_that_ranks_must_agree_on(change):
    one, other = (plan_of(fsdp([(8, 8), (8, 4)], 2, **options)) for options in ({}, change))
    assert digest(describe(one, (0, 1))) != digest(describe(other, (0, 1)))


def test_r29_many_layer_types_are_balanced_by_cost():
    plan = plan_of(fsdp([(64, 64)] * 4 + [(64, 16)] * 4 + [(16, 16)] * 4, 4))
    assert imbalance(plan) <= 1.3
    per_rank = Counter((a.owners[0], a.request.matrix.shape) for a in plan.assignments)
    assert set(per_rank.values()) == {1}


@pytest.mark.parametrize("giant", [256, 64, 24])
def test_one_giant_and_many_small_reach_the_lower_bound(giant):
    shapes = [(giant, giant)] + [(16, 16)] * 7
    plan = plan_of(fsdp(shapes, 4))
    costs = [newton_schulz_flops(shape, 5) for shape in shapes]
    small = costs[1]
    # Whole matrices: the giant alone, or the small ones dealt out as evenly as they can be.
    lower_bound = max(costs[0], sum(costs) / 4, small * math.ceil(7 / 3))
    assert max(plan.loads().values()) == lower_bound


def optimum(costs, num_ranks):
    """The least possible largest load, by mixed-integer programming."""
    num_costs = len(costs)
    num_x = num_costs * num_ranks
    objective = np.zeros(num_x + 1)
    objective[-1] = 1
    placed = np.zeros((num_costs, num_x + 1))
    load = np.zeros((num_ranks, num_x + 1))
    for i, rank in itertools.product(range(num_costs), range(num_ranks)):
        placed[i, i * num_ranks + rank] = 1
        load[rank, i * num_ranks + rank] = costs[i] / max(costs)
    load[:, -1] = -1
    integral = np.ones(num_x + 1)
    integral[-1] = 0
    upper = np.ones(num_x + 1)
    upper[-1] = np.inf
    solution = milp(
        objective,
        integrality=integral,
        bounds=Bounds(0, upper),
        constraints=[LinearConstraint(placed, 1, 1), LinearConstraint(load, -np.inf, 0)],
    )
    assert solution.success
    return solution.fun * max(costs)


def gap_to_optimum(shapes, num_ranks):
    plan = plan_of(fsdp(shapes, num_ranks))
    costs = [newton_schulz_flops(shape, 5) for shape in shapes]
    return max(plan.loads().values()) / optimum(costs, num_ranks) - 1


@pytest.mark.parametrize(
    ("seconds", "num_ranks", "best"),
    [
        # Longest first gives 3 + 2 + 2 against 3 + 2; a swap of 3 and 2 + 2 is a move and a swap.
        ((3, 3, 2, 2, 2), 2, 6),
        ((5, 5, 4, 4, 3, 3, 3), 3, 9),
        ((7, 7, 6, 6, 5, 5, 4, 4, 4), 4, 12),
    ],
)
def test_owners_are_improved_where_longest_first_is_not_the_best(seconds, num_ranks, best):
    sides = {cost: 8 * (1 + i) for i, cost in enumerate(sorted(set(seconds)))}
    model = CostModel({("float32", (side, side)): cost / 5 for cost, side in sides.items()})
    requests = fsdp([(sides[cost], sides[cost]) for cost in seconds], num_ranks)
    assert max(plan_of(requests, cost_model=model).loads().values()) == pytest.approx(best)


SIDES = [8, 12, 16, 24, 32, 48, 64]


def test_largest_load_is_within_a_few_percent_of_the_optimum():
    # Over 800 such instances the mean gap was 0.02 % and the largest 4 %.
    generator = random.Random(0)
    gaps = []
    for _ in range(40):
        num_matrices, num_ranks = generator.randint(3, 9), generator.randint(2, 3)
        sides = generator.choices(SIDES, k=2 * num_matrices)
        gaps.append(gap_to_optimum(list(zip(sides[::2], sides[1::2], strict=True)), num_ranks))
    assert max(gaps) <= 0.05
    assert sum(gaps) / len(gaps) <= 0.005


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=2, max_size=6),
    st.integers(2, 3),
)
def test_largest_load_keeps_the_guarantee_of_longest_processing_time_first(shapes, num_ranks):
    # Every rank needs a row of every matrix, or it is no candidate.
    shapes = [(rows + 2, cols) for rows, cols in shapes]
    assert gap_to_optimum(shapes, num_ranks) <= 1 / 3 - 1 / (3 * num_ranks) + 1e-6


@given(laid_out(), st.integers(1, 2048))
def test_buckets_are_bounded_and_hold_one_wire_dtype(params, bucket_bytes):
    plan = plan_of(all_requests(params), bucket_bytes)
    for bucket in plan.buckets:
        received = Counter()
        count = Counter()
        for a in bucket.assignments:
            assert a.request.domain == bucket.domain
            assert a.request.wire_dtype == bucket.wire_dtype
            received[a.owners[0]] += a.request.num_bytes
            count[a.owners[0]] += 1
        assert all(n <= bucket_bytes or count[rank] == 1 for rank, n in received.items())


def test_buckets_are_as_few_as_the_bound_allows():
    plan = plan_of(fsdp([(16, 16)] * 8, 2), bucket_bytes=2 * 16 * 16 * 4)
    assert [len(bucket.assignments) for bucket in plan.buckets] == [4, 4]


def elements(case, rank):
    return set(case.stored_by(rank).flatten().tolist())


def fewest_bytes(params, plan):
    """Bytes that each rank must send, counted element by element from what torch's cuts store."""
    sent = dict.fromkeys(plan.loads(), 0)
    by_name = {param.fqn: param for param in params}
    for a in plan.assignments:
        param, (owner,) = by_name[a.request.matrix.fqn], a.owners
        source, target = param.source, param.target
        itemsize = {"float32": 4, "bfloat16": 2}[a.request.wire_dtype]
        missing = set(range(source.whole.numel())) - elements(source, owner)
        # Any replica could send what is missing; the plan takes the owner's own.
        replica = source.layout.replica(owner)
        same_replica = [rank for rank in source.ranks if source.layout.replica(rank) == replica]
        for rank in same_replica:
            sent[rank] += itemsize * len(elements(source, rank) & missing)
        assert set().union(*(elements(source, rank) for rank in same_replica)) >= missing
        others = [rank for rank in target.ranks if rank != owner]
        sent[owner] += itemsize * sum(len(elements(target, rank)) for rank in others)
    return sent


def legs_bytes(plan, rank):
    """Bytes that a rank sends and receives, by its itineraries."""
    sent = received = 0
    for bucket in plan.buckets:
        itemsize = torch.empty((), dtype=getattr(torch, bucket.wire_dtype)).itemsize
        if rank not in bucket.domain:
            continue
        part = bucket.itinerary(rank)
        sent += itemsize * sum(x.piece.numel for x in (*part.gather.sends, *part.scatter.sends))
        received += itemsize * sum(
            x.piece.numel for x in (*part.gather.receives, *part.scatter.receives)
        )
    return sent, received


@given(laid_out(), st.integers(1, 2048))
def test_bytes_sent_are_the_minimum_and_all_arrive(params, bucket_bytes):
    plan = plan_of(all_requests(params), bucket_bytes)
    assert plan.bytes_sent() == fewest_bytes(params, plan)
    traffic = {rank: legs_bytes(plan, rank) for rank in plan.loads()}
    assert {rank: sent for rank, (sent, _) in traffic.items()} == plan.bytes_sent()
    assert sum(sent for sent, _ in traffic.values()) == sum(got for _, got in traffic.values())


@given(laid_out(), st.booleans(), st.integers(1, 2048))
def test_what_a_rank_sends_to_another_is_what_that_one_expects_in_order(
    params, repeat, bucket_bytes
):
    plan = plan_of(all_requests(params), bucket_bytes, repeat=repeat)
    for bucket in plan.buckets:
        parts = {rank: bucket.itinerary(rank) for rank in bucket.domain}
        for way in ("gather", "scatter"):
            routes = {rank: getattr(part, way) for rank, part in parts.items()}
            for r, s in itertools.permutations(bucket.domain, 2):
                sends = [(x.position, x.piece) for x in routes[r].sends if x.peer == s]
                receives = [(x.position, x.piece) for x in routes[s].receives if x.peer == r]
                assert sends == receives
            moves = any(route.sends for route in routes.values())
            assert {route.moves for route in routes.values()} == {moves}


@given(laid_out(), st.booleans())
def test_owners_get_whole_matrices_and_every_holder_its_piece_of_the_update(params, repeat):
    plan = plan_of(all_requests(params), repeat=repeat)
    for bucket in plan.buckets:
        for rank in bucket.domain:
            part = bucket.itinerary(rank)
            gathered, updated = Counter(), Counter()
            for leg in (*part.gather.receives, *part.gather.kept):
                gathered[leg.position] += leg.piece.numel
            for leg in (*part.scatter.receives, *part.scatter.kept):
                updated[leg.position] += leg.piece.numel
            for position, a in enumerate(bucket.assignments):
                owned = a.request.matrix.numel if rank in a.owners else 0
                stored = a.request.target.pieces(a.request.matrix.block).get(rank)
                held = a.request.source.pieces(a.request.matrix.block).get(rank)
                assert gathered[position] == owned
                assert updated[position] == (stored.numel if stored else 0)
                assert part.held.get((position, 0)) == held


@given(laid_out())
def test_repeating_per_replica_moves_nothing_between_replicas(params):
    plan = plan_of(all_requests(params), repeat=True)
    for bucket in plan.buckets:
        for rank in bucket.domain:
            part = bucket.itinerary(rank)
            for way, route in (("source", part.gather), ("target", part.scatter)):
                for leg in route.sends:
                    layout = getattr(bucket.assignments[leg.position].request, way)
                    assert layout.replica(leg.peer) == layout.replica(rank)
    for a in plan.assignments:
        target = a.request.target
        assert [target.replica(owner) for owner in a.owners] == list(range(target.num_replicas))


def test_replicas_share_the_work_instead_of_repeating_it():
    layout = Layout((6, 4), (2, 2), (0, 1, 2, 3), (None, Sharding(0)))
    requests = [r for i in range(8) for r in requests_of(f"p{i}", (6, 4), layout)]
    plan = plan_of(requests)
    assert [plan.num_orthogonalized(rank) for rank in range(4)] == [2, 2, 2, 2]
    repeated = plan_of(requests, repeat=True)
    assert [repeated.num_orthogonalized(rank) for rank in range(4)] == [4, 4, 4, 4]


def test_matrices_that_lie_whole_on_one_rank_stay_there_and_move_nothing():
    experts = Layout((8, 6, 4), (4,), (0, 1, 2, 3), ROWS)
    alone = Layout((4, 4), (1,), (2,), (None,))
    plan = plan_of(requests_of("experts", (8, 6, 4), experts) + requests_of("p", (4, 4), alone))
    owners = {str(a.request.matrix): a.owners for a in plan.assignments}
    assert owners["p[0:4, 0:4]"] == (2,)
    assert all(owners[f"experts[{i}][0:6, 0:4]"] == (i // 2,) for i in range(8))
    assert set(plan.bytes_sent().values()) == {0}
    for bucket in plan.buckets:
        part = bucket.itinerary(bucket.domain[0])
        assert not part.gather.moves
        assert not part.scatter.moves


def test_equal_loads_go_to_the_rank_that_holds_most():
    # Rows 2, 2, 1, 0: all ranks are idle, and the first two hold most.
    plan = plan_of(fsdp([(5, 7)], 4))
    assert plan.assignments[0].owners == (0,)
    plan = plan_of(fsdp([(5, 7)], 4, ranks=(3, 2, 1, 0)))
    assert plan.assignments[0].owners == (2,)


def test_rank_with_an_empty_shard_owns_nothing():
    plan = plan_of(fsdp([(3, 9)] * 12, 4))
    assert [plan.num_orthogonalized(rank) for rank in range(4)] == [4, 4, 4, 0]


def test_smaller_domain_makes_up_for_the_loads_of_a_larger_one():
    # One matrix over four ranks keeps rank 0 busy, so rank 1 takes what ranks 0 and 1 share.
    large = fsdp([(32, 32)], 4, name="large")
    small = fsdp([(16, 16)] * 4, 2, name="small")
    plan = plan_of(large + small)
    assert plan.domains == [(0, 1, 2, 3), (0, 1)]
    owners = {a.request.matrix.fqn: a.owners for a in plan.assignments}
    assert owners["large0"] == (0,)
    assert {owners[f"small{i}"] for i in range(4)} == {(1,)}


def test_load_that_not_all_ranks_of_a_domain_know_is_not_carried_into_it():
    # Ranks 0 and 1 share what rank 2 cannot know of; ranks 1 and 2 must plan alike.
    first, second = fsdp([(32, 32)], 2), fsdp([(16, 16)] * 2, 2, ranks=(1, 2), name="q")
    together, alone = plan_of(first + second), plan_of(second)
    assert describe(together, (1, 2)) == describe(alone, (1, 2))
    first = fsdp([(32, 32)] * 2, 2)
    assert describe(plan_of(first + second), (1, 2)) == describe(alone, (1, 2))


def test_momentum_in_another_layout_is_gathered_from_there():
    # ZeRO-1: the parameter is whole on every rank, its momentum is cut by rows.
    whole = Layout((6, 4), (2,), (0, 1), (None,))
    (request,) = requests_of("p", (6, 4), whole, source=Layout((6, 4), (2,), (0, 1), ROWS))
    plan = plan_of([request])
    assert plan.assignments[0].owners == (0,)
    # Rank 1 sends its half of the momentum; rank 0 sends rank 1 the whole update.
    assert plan.bytes_sent() == {0: 6 * 4 * 4, 1: 3 * 4 * 4}


def test_measured_times_replace_flops():
    requests = fsdp([(32, 32), (16, 16), (16, 16)], 2)
    assert max(plan_of(requests).loads().values()) == newton_schulz_flops((32, 32), 5)
    model = CostModel({("float32", (32, 32)): 1.0, ("float32", (16, 16)): 3.0})
    plan = plan_of(requests, cost_model=model)
    assert sorted(plan.loads().values()) == [15.0, 20.0]


def llama_shapes(layers, width):
    block = [(width, width)] * 2 + [(width // 4, width)] * 2
    return (block + [(3 * width, width)] * 2 + [(width, 3 * width)]) * layers


@pytest.mark.parametrize(("world", "layers"), [(64, 32), (512, 32)])
def test_plan_of_a_large_job_is_balanced_and_complete(world, layers):
    shapes = llama_shapes(layers, 1024)
    requests = fsdp(shapes, world, wire_dtype="bfloat16")
    plan = plan_of(requests, bucket_bytes=64 * MIB)
    assert names(plan) == Counter(str(request.matrix) for request in requests)
    costs = [newton_schulz_flops(shape, 5) for shape in shapes]
    # No plan of whole matrices does better than its largest matrix, or than the mean.
    lower_bound = max(*costs, sum(costs) / world)
    assert max(plan.loads().values()) <= 1.1 * lower_bound
    assert sum(plan.bytes_sent().values()) > 0


def test_large_hybrid_job_uses_all_replicas():
    shapes = llama_shapes(16, 512)
    layouts = [Layout(s, (8, 8), tuple(range(64)), (None, Sharding(0))) for s in shapes]
    pairs = zip(shapes, layouts, strict=True)
    requests = [r for i, (s, x) in enumerate(pairs) for r in requests_of(f"p{i}", s, x)]
    plan = plan_of(requests)
    assert imbalance(plan) <= 1.4
    assert sum(plan.num_orthogonalized(rank) for rank in range(64)) == len(shapes)


def test_plan_without_matrices_is_empty():
    plan = plan_of([])
    assert plan == Plan()
    assert (plan.domains, plan.loads(), plan.bytes_sent()) == ([], {}, {})


def test_bucket_without_absent_parameters_keeps_the_order_of_the_others():
    (bucket,) = plan_of(fsdp([(8, 8)] * 4, 2)).buckets
    kept = bucket.without(frozenset({"p1", "p3"}))
    assert [a.request.matrix.fqn for a in kept.assignments] == ["p0", "p2"]
    assert (kept.domain, kept.wire_dtype) == (bucket.domain, bucket.wire_dtype)


def test_one_process_plan_has_no_exchange():
    requests = [r for i in range(3) for r in requests_of(f"p{i}", (4, 4), single_rank((4, 4), 0))]
    plan = plan_of(requests)
    assert plan.bytes_sent() == {0: 0}
    assert plan.num_orthogonalized(0) == 3
