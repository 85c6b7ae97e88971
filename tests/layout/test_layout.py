"""Layout arithmetic against `DTensor` itself, over random meshes and placements."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard

from dmuon.layout.layout import (
    Layout,
    Sharding,
    chunk_range,
    merge_runs,
    single_rank,
    take_runs,
)
from dmuon.layout.local import local_part
from dmuon.layout.matrices import matrices_of, runs_size
from dmuon.layout.placements import read_layout, wire_device


@dataclass(frozen=True)
class Case:
    """A tensor on a mesh, in torch's terms, and one rank to look at."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]
    rank: int

    @property
    def layout(self):
        shardings = (
            None
            if isinstance(p, Replicate)
            else Sharding(p.dim % len(self.shape), getattr(p, "split_factor", 1))
            for p in self.placements
        )
        return Layout(self.shape, self.mesh, self.ranks, tuple(shardings))

    @property
    def whole(self):
        return torch.arange(math.prod(self.shape)).view(self.shape)

    def stored_by(self, rank):
        """What a rank stores of `whole`, cut by torch's placements from left to right."""
        coordinate = (torch.tensor(self.ranks).view(self.mesh) == rank).nonzero()[0].tolist()
        tensor = self.whole
        for placement, size, position in zip(self.placements, self.mesh, coordinate, strict=True):
            if isinstance(placement, Replicate):
                continue
            dim = placement.dim % len(self.shape)
            strided = isinstance(placement, _StridedShard)
            cutter = (
                _StridedShard(dim, split_factor=placement.split_factor) if strided else Shard(dim)
            )
            parts, _ = cutter._split_tensor(tensor, size, with_padding=False, contiguous=False)
            tensor = parts[position]
        return tensor


MESHES = st.one_of(
    st.tuples(st.integers(1, 16)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from([(2, 2, 2), (1, 3, 2), (2, 2, 4), (4, 2, 2), (3, 1, 5), (2, 3, 2)]),
)


@st.composite
def cases(draw, min_dims=1):
    mesh = draw(MESHES)
    ndim = draw(st.integers(min_dims, 4))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=ndim, max_size=ndim)))
    dims = st.integers(-ndim, ndim - 1)
    placements = st.one_of(
        st.builds(Shard, dims),
        st.just(Replicate()),
        st.builds(
            lambda dim, split_factor: _StridedShard(dim % ndim, split_factor=split_factor),
            dims,
            st.integers(1, 5),
        ),
    )
    size = math.prod(mesh)
    return Case(
        shape,
        mesh,
        tuple(draw(st.permutations(range(size)))),
        tuple(draw(placements) for _ in mesh),
        draw(st.integers(0, size - 1)),
    )


def indices(runs):
    return [i for start, stop in runs for i in range(start, stop)]


def select(tensor, per_dim):
    for dim, runs in enumerate(per_dim):
        tensor = tensor.index_select(dim, torch.tensor(indices(runs), dtype=torch.long))
    return tensor


@given(cases())
def test_every_rank_stores_what_torchs_placements_cut(case):
    for rank in case.ranks:
        stored = case.stored_by(rank)
        found = select(case.whole, case.layout.local_runs(rank))
        assert case.layout.local_shape(rank) == tuple(stored.shape)
        assert torch.equal(found, stored)


@given(case=cases())
def test_layout_read_from_a_dtensor_gives_its_local_tensor(fake_world, case):
    with fake_world(len(case.ranks), case.rank):
        mesh = DeviceMesh("cpu", torch.tensor(case.ranks).view(case.mesh))
        tensor = distribute_tensor(case.whole, mesh, case.placements, src_data_rank=None)
        layout = read_layout("p", tensor)
        assert layout == case.layout
        assert torch.equal(select(case.whole, layout.local_runs(case.rank)), tensor.to_local())


@given(cases())
def test_every_element_is_stored_once_per_replica(case):
    layout = case.layout
    count = torch.zeros(math.prod(case.shape), dtype=torch.long)
    copies: dict[int, list[int]] = {}
    for rank in case.ranks:
        stored = case.stored_by(rank).flatten()
        count[stored] += 1
        copies.setdefault(layout.replica(rank), []).extend(stored.tolist())
    assert count.unique().tolist() == [layout.num_replicas]
    assert sorted(copies) == list(range(layout.num_replicas))
    for stored in copies.values():
        assert sorted(stored) == list(range(math.prod(case.shape)))


@st.composite
def matrices(draw):
    """A case, and how its tensor is read as matrices."""
    case = draw(cases(min_dims=2))
    flatten = draw(st.booleans())
    dim = 0 if flatten else draw(st.integers(0, 1))
    size = case.shape[0] if flatten else case.shape[-2:][dim]
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True))
    return case, matrices_of("p", case.shape, flatten=flatten, split=(sizes, dim))


@given(matrices())
def test_pieces_tile_every_matrix_and_are_views_of_the_local_tensor(drawn):
    case, found = drawn
    layout, local = case.layout, {rank: case.stored_by(rank).clone() for rank in case.ranks}
    total = 0
    for matrix in found:
        block = matrix.block
        view = case.whole.flatten(1) if block.flatten else case.whole[block.batch]
        whole = view[slice(*block.rows), slice(*block.cols)]
        assert whole.shape == matrix.shape
        covered: list[int] = []
        for rank, piece in layout.pieces(block).items():
            part = local[rank][piece.index]
            assert part.untyped_storage().data_ptr() == local[rank].untyped_storage().data_ptr()
            assert torch.equal(part.reshape(piece.shape), select(whole, (piece.rows, piece.cols)))
            covered += part.flatten().tolist()
            total += piece.numel
        assert sorted(covered) == sorted(whole.flatten().tolist() * layout.num_replicas)
    assert total == sum(tensor.numel() for tensor in local.values())


@given(matrices())
def test_only_ranks_that_store_something_have_a_piece_in_rank_order(drawn):
    case, found = drawn
    holders = {rank for rank in case.ranks if case.stored_by(rank).numel()}
    for matrix in found:
        pieces = case.layout.pieces(matrix.block)
        assert list(pieces) == sorted(pieces)
        assert all(piece.numel > 0 for piece in pieces.values())
        holders -= set(pieces)
    assert not holders


@pytest.mark.parametrize(
    ("shape", "world", "rows"),
    [
        ((9, 8), 4, [3, 3, 3, 0]),
        ((18, 32), 4, [5, 5, 5, 3]),
        ((5, 7), 4, [2, 2, 1, 0]),
        ((3, 9), 4, [1, 1, 1, 0]),
        ((1, 8), 4, [1, 0, 0, 0]),
        ((6, 4), 2, [3, 3]),
    ],
)
def test_rows_of_uneven_and_empty_shards(shape, world, rows):
    layout = Layout(shape, (world,), tuple(range(world)), (Sharding(0),))
    assert [layout.local_shape(rank)[0] for rank in range(world)] == rows
    (matrix,) = matrices_of("p", shape)
    assert list(layout.pieces(matrix.block)) == [rank for rank in range(world) if rows[rank]]


def test_fsdp2_over_tensor_parallelism_gives_each_rank_one_run_of_rows():
    layout = Layout((10, 6), (2, 2), (0, 1, 2, 3), (Sharding(0, 2), Sharding(0)))
    rows = [layout.local_runs(rank)[0] for rank in range(4)]
    assert rows == [((0, 3),), ((5, 8),), ((3, 5),), ((8, 10),)]


def test_replicas_are_numbered_over_the_replicating_axes():
    layout = Layout((4, 4), (2, 2, 2), tuple(range(8)), (None, Sharding(0), None))
    assert [layout.replica(rank) for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert layout.num_replicas == 4


def test_plain_tensor_belongs_to_one_rank_or_to_its_process_group(fake_world):
    tensor = torch.zeros(3, 4)
    assert read_layout("p", tensor) == single_rank((3, 4), 0)
    with fake_world(4, rank=2):
        assert read_layout("p", tensor) == single_rank((3, 4), 2)
        group = torch.distributed.group.WORLD
        assert read_layout("p", tensor, group) == Layout((3, 4), (4,), (0, 1, 2, 3), (None,))


def test_partial_placement_is_an_error_that_names_the_parameter(fake_world):
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.zeros(4, 4), mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match=r"layers\.0\.weight: placement Partial.* mesh axis 0"):
            read_layout("layers.0.weight", tensor)


def test_local_shape_that_the_placements_do_not_imply_is_an_error_that_names_it(fake_world):
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.zeros(2, 4), mesh, [Shard(0)], run_check=False, shape=(6, 4), stride=(4, 1)
        )
        with pytest.raises(ValueError, match=r"layers\.0\.weight: .*\(3, 4\).*has \(2, 4\)"):
            read_layout("layers.0.weight", tensor)


@given(st.integers(0, 40), st.integers(1, 12))
def test_chunk_range_is_torch_chunk(size, num_chunks):
    whole = torch.arange(size)
    chunks = [whole[slice(*chunk_range(size, num_chunks, i))] for i in range(num_chunks)]
    expected = whole.chunk(num_chunks) if size else ()
    assert [c.tolist() for c in chunks if len(c)] == [c.tolist() for c in expected]


@st.composite
def ascending_runs(draw):
    bounds = sorted(draw(st.sets(st.integers(0, 40), max_size=10)))
    return tuple(zip(bounds[::2], bounds[1::2], strict=False))


@given(ascending_runs(), st.integers(0, 45), st.integers(0, 45))
def test_take_runs_slices_the_listed_indices(runs, start, stop):
    taken = take_runs(runs, start, stop)
    assert indices(taken) == indices(runs)[start:stop]
    assert all(first < last for first, last in taken)


@given(st.sets(st.integers(0, 20)))
def test_merge_runs_lists_the_same_indices_in_the_fewest_runs(numbers):
    ordered = sorted(numbers)
    merged = merge_runs(tuple((i, i + 1) for i in ordered))
    assert indices(merged) == ordered
    assert runs_size(merged) == len(ordered)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(merged))


@given(cases())
def test_local_part_is_the_stored_view_or_says_that_it_is_strided(case):
    layout, whole = case.layout, case.whole
    if any(len(runs) > 1 for runs in layout.local_runs(case.rank)):
        with pytest.raises(ValueError, match="strided"):
            local_part(whole, layout, case.rank)
    else:
        part = local_part(whole, layout, case.rank)
        assert torch.equal(part, case.stored_by(case.rank))
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_matrices_travel_on_the_device_of_the_tensor_or_of_its_mesh(fake_world):
    plain = torch.zeros(4, 4)
    assert wire_device(plain) == torch.device("cpu")
    with fake_world(2):
        tensor = distribute_tensor(plain, init_device_mesh("cpu", (2,)), [Shard(0)])
        assert wire_device(tensor) == torch.device("cpu")


def test_layout_reads_as_mesh_and_placements():
    layout = Layout((4, 4), (2, 2, 2), tuple(range(8)), (None, Sharding(0, 2), Sharding(1)))
    assert str(layout) == "2x2x2 (Replicate, Shard(0)s, Shard(1))"
