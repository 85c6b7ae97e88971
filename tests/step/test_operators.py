"""What the host does in a step does not grow with the number of equal matrices."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dmuon
from tests.support.operators import operators
from tests.support.parity import seeded

# Torch's `DTensor.to_local` of a parameter takes a view (pytorch/pytorch issue 166156).
LOCAL_VIEW = "aten::view_as"


def stepped(shapes, placements, options, muon):
    """Operators of a step, once the plan is made, on parameters of these shapes."""
    mesh = init_device_mesh("cpu", (4,) * len(placements)) if placements else None

    def lay_out(values):
        if mesh is None:
            return values
        return distribute_tensor(values, mesh, placements, src_data_rank=None)

    params = [nn.Parameter(lay_out(seeded(shape, i))) for i, shape in enumerate(shapes)]
    optimizer = dmuon.Muon([{"params": params, **options}], ns_steps=1, **muon)
    for i, param in enumerate(params):
        param.grad = lay_out(seeded(shapes[i], 1, i))
    for _ in range(2):
        optimizer.step()
    return operators(optimizer.step)


ROWS = (Shard(0),)
CASES = {
    "one process": ((), lambda n: [(6, 4)] * n, {}, {}),
    "one process, tall and wide": ((), lambda n: [(6, 4)] * n + [(4, 6)] * n, {}, {}),
    "convolutions": ((), lambda n: [(6, 4, 3)] * n, {"flatten": True}, {}),
    "experts in one stack": ((), lambda n: [(n, 6, 4)], {}, {}),
    "fused QKV": ((), lambda n: [(12, 4)] * n, {"split": (4, 4, 4)}, {}),
    "NorMuon": ((), lambda n: [(6, 4)] * n, {}, {"algorithm": "normuon"}),
    "FSDP2": (ROWS, lambda n: [(8, 4)] * n, {}, {}),
    "FSDP2, uneven": (ROWS, lambda n: [(6, 4)] * n, {}, {}),
    "FSDP2, convolutions": (ROWS, lambda n: [(8, 4, 3)] * n, {"flatten": True}, {}),
    "FSDP2, experts in one stack": ((Shard(1),), lambda n: [(n, 8, 4)], {}, {}),
    "FSDP2, whole experts": (ROWS, lambda n: [(n, 8, 4)], {}, {}),
    "FSDP2, fused QKV": (ROWS, lambda n: [(12, 4)] * n, {"split": (4, 4, 4)}, {}),
    "FSDP2, NorMuon": (ROWS, lambda n: [(8, 4)] * n, {}, {"algorithm": "normuon"}),
    "HSDP": ((Replicate(), Shard(0)), lambda n: [(8, 4)] * n, {}, {}),
}


# Here a step takes parts of a local tensor: a view of each, which copies nothing.
WITH_PARTS = {
    # Blocks of other shapes have other learning-rate scales.
    "unequal blocks of rows": ((), lambda n: [(16, 4)] * n, {"split": (8, 4, 4)}, {}),
    "unequal blocks of columns": ((), lambda n: [(4, 9)] * n, {"split": ((6, 3), 1)}, {}),
    # The bytes of rows travel as elements of the wire.
    "rows on a half-precision wire": (
        ROWS,
        lambda n: [(8, 4)] * n,
        {"ns_dtype": torch.bfloat16},
        {"algorithm": "normuon"},
    ),
}
VIEWS = {"aten::slice", "aten::view"}


def counted(fake_world, case):
    """Operators by number of matrices, of which each rank owns as many."""
    placements, shapes, options, muon = case
    num_ranks = 4 ** len(placements)
    nums = [2 * num_ranks, 4 * num_ranks]
    with fake_world(num_ranks):
        found = [stepped(shapes(num), placements, options, muon) for num in nums]
    for num, count in zip(nums, found, strict=True):
        assert count[LOCAL_VIEW] <= (len(shapes(num)) if placements else 0)
        del count[LOCAL_VIEW]
    return found


@pytest.mark.parametrize("case", CASES)
def test_operators_do_not_grow_with_the_number_of_equal_matrices(fake_world, case):
    one, two = counted(fake_world, CASES[case])
    assert one == two
    assert any(name.startswith("aten::_foreach_") for name in one)


@pytest.mark.parametrize("case", WITH_PARTS)
def test_nothing_but_views_grows_where_parts_of_parameters_are_taken(fake_world, case):
    one, two = counted(fake_world, WITH_PARTS[case])
    assert {name for name in one | two if one[name] != two[name]} <= VIEWS
    assert one != two  # or this case belongs above
