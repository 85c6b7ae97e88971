import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import dmuon
from tests.support.layout_cases import CASES
from tests.support.parity import full_tensor, meshes_of, seeded

S, R = Shard, Replicate()
MAX_NORM = 0.7


def parameter(local_or_full, mesh=None, placements=None):
    """A parameter whose value and gradient are one tensor, cut as `placements` say."""
    if mesh is not None:
        local_or_full = distribute_tensor(local_or_full, mesh, placements, src_data_rank=None)
    p = nn.Parameter(local_or_full.clone())
    p.grad = local_or_full.clone()
    return p


def one_process(tensors, norm_type=2.0):
    """Norm and clipped gradients of whole tensors."""
    params = [parameter(t) for t in tensors]
    norm = torch.nn.utils.clip_grad_norm_(params, MAX_NORM, norm_type)
    return norm, [p.grad for p in params]


def clip_layout(specs, muon, norm_type):
    meshes = meshes_of(specs)
    wholes = [seeded(spec.shape, i).to(spec.dtype) for i, spec in enumerate(specs)]
    params = [
        parameter(whole, spec.mesh and meshes[spec.mesh], spec.placements)
        for whole, spec in zip(wholes, specs, strict=True)
    ]
    if muon.get("process_group") == "world":
        muon = {**muon, "process_group": dist.group.WORLD}
    groups = [{"params": [p], **spec.options} for p, spec in zip(params, specs, strict=True)]
    optimizer = dmuon.Muon(groups, **muon)
    with CommDebugMode() as collectives:
        norm = dmuon.clip_grad_norm_(optimizer, MAX_NORM, norm_type)
    expected, clipped = one_process([w.float() for w in wholes], norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for p, reference, spec in zip(params, clipped, specs, strict=True):
        grad = full_tensor(p.grad)
        if grad is not None:
            torch.testing.assert_close(grad, reference.to(spec.dtype))
    # One for the norm; before it the hosts of each mesh agree on what is still to be added up.
    ranks = {mesh.mesh.flatten() for mesh in meshes.values() if mesh.get_coordinate() is not None}
    domains = {tuple(sorted(r.tolist())) for r in ranks if len(r) > 1}
    if muon.get("process_group") and any(spec.mesh is None for spec in specs):
        domains.add(tuple(range(dist.get_world_size())))
    return norm.item(), collectives.get_total_counts() - len(domains)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_norm_is_that_of_one_process_on_every_layout(run_ranks, case, norm_type):
    results = run_ranks(case.world_size, clip_layout, case.specs, case.muon, norm_type)
    norms, collectives = zip(*results, strict=True)
    assert set(norms) == {norms[0]}, "ranks differ"
    assert set(collectives) == {1}


def clip_mixed_meshes():
    """dp=4 and (ep2 x efsdp2) weights and one plain bias, through every way to pass them."""
    dp, experts = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    wholes = [seeded(shape, 5) for shape in [(9, 8), (1, 6), (4, 6, 3), (7,)]]
    expected, clipped = one_process(wholes)
    for form in ("parameters", "optimizer", "optimizer with process_group"):
        params = [
            parameter(wholes[0], dp, [S(0)]),
            parameter(wholes[1], dp, [S(0)]),
            parameter(wholes[2], experts, [S(0), S(1)]),
            parameter(wholes[3]),
        ]
        groups = [{"params": params[:3]}, {"params": params[3:], "algorithm": "adamw"}]
        group = dist.group.WORLD if "process_group" in form else None
        what = params if form == "parameters" else dmuon.Muon(groups, process_group=group)
        norm = dmuon.clip_grad_norm_(what, MAX_NORM)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for p, reference in zip(params, clipped, strict=True):
            torch.testing.assert_close(full_tensor(p.grad), reference)
    return norm.item()


def test_r65_dense_expert_and_plain_parameters_have_one_norm(run_ranks):
    assert len(set(run_ranks(4, clip_mixed_meshes))) == 1


def clip_experts_of_sub_meshes():
    """Ranks 0, 1 and ranks 2, 3 hold different experts of one name, beside a dense weight."""
    rank = dist.get_rank()
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))["efsdp"]
    dense = seeded((9, 8), 0)
    experts = [seeded((4, 6, 3), 1), seeded((4, 6, 3), 2)]
    params = [
        parameter(dense, init_device_mesh("cpu", (4,)), [S(0)]),
        parameter(experts[rank // 2], own, [S(1)]),
    ]
    expected, clipped = one_process([dense, *experts])
    norm = dmuon.clip_grad_norm_(dmuon.Muon(params), MAX_NORM)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(full_tensor(params[1].grad), clipped[1 + rank // 2])
    return norm.item()


def test_experts_that_differ_between_expert_parallel_ranks_all_count(run_ranks):
    assert len(set(run_ranks(4, clip_experts_of_sub_meshes))) == 1


def clip_pipeline(sharded):
    """Two stages with two ranks each; a stage is sharded, or plain and replicated."""
    rank = dist.get_rank()
    stages = [seeded((6, 4), 0), seeded((5, 3), 1)]
    mesh = init_device_mesh("cpu", (2, 2))
    stage = DeviceMesh.from_group(mesh.get_group(1), "cpu")
    if sharded:
        params = [parameter(stages[rank // 2], stage, [S(0)])]
        norm = dmuon.clip_grad_norm_(params, MAX_NORM)
    else:
        params = [parameter(stages[rank // 2])]
        optimizer = dmuon.Muon(params, process_group=stage.get_group())
        norm = dmuon.clip_grad_norm_(optimizer, MAX_NORM)
    expected, clipped = one_process(stages)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(full_tensor(params[0].grad), clipped[rank // 2])


@pytest.mark.parametrize("sharded", [True, False], ids=["FSDP2 stages", "DDP stages"])
def test_stages_of_a_pipeline_have_one_norm(run_ranks, sharded):
    run_ranks(4, clip_pipeline, sharded)


def clip_within_a_group():
    """Plain stages of one rank each; and a model on ranks 0 and 1 that rank 2 knows nothing of."""
    rank = dist.get_rank()
    wholes = [seeded((4, 3), i) for i in range(3)]
    params = [parameter(wholes[rank])]
    norm = dmuon.clip_grad_norm_(params, MAX_NORM, group=dist.group.WORLD)
    torch.testing.assert_close(norm, one_process(wholes)[0], rtol=1e-6, atol=0)
    pair = dist.new_group([0, 1])
    if rank < 2:
        mesh = DeviceMesh.from_group(pair, "cpu")
        params = [parameter(wholes[0], mesh, [S(0)])]
        norm = dmuon.clip_grad_norm_(params, MAX_NORM, group=pair)
        torch.testing.assert_close(norm, one_process(wholes[:1])[0], rtol=1e-6, atol=0)
    else:
        torch.testing.assert_close(
            dmuon.clip_grad_norm_([parameter(wholes[2])], MAX_NORM), wholes[2].norm()
        )


def test_a_group_says_which_ranks_share_a_model(run_ranks):
    run_ranks(3, clip_within_a_group)


def clip_partial():
    mesh = init_device_mesh("cpu", (2, 2))
    whole, addends = seeded((6, 4), 0), [seeded((6, 4), 1, i) for i in range(4)]
    p = nn.Parameter(distribute_tensor(whole, mesh, [S(0), R]))
    p.grad = DTensor.from_local(
        addends[dist.get_rank()].clone(), mesh, [Partial(), Partial()], run_check=False
    )
    norm = dmuon.clip_grad_norm_([p], MAX_NORM)
    expected, (clipped,) = one_process([sum(addends)])
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(p.grad.full_tensor(), clipped)


def test_a_partial_gradient_is_summed_before_it_is_measured(run_ranks):
    run_ranks(4, clip_partial)


def clip_one_bad_element(layout, norm_type):
    mesh = init_device_mesh("cpu", (2,))
    params = [parameter(seeded((4, 4), 0), mesh, [S(0)]), parameter(seeded((3,), 1))]
    bad = params[0].grad.to_local() if layout == "sharded" else params[1].grad
    if dist.get_rank() == 1:
        bad.view(-1)[0] = math.nan
    with pytest.raises(RuntimeError, match="gradient norm"):
        dmuon.clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
    return dmuon.clip_grad_norm_(params, 1.0, norm_type).isfinite().item()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_a_bad_element_of_one_rank_shows_in_the_norm_of_all(run_ranks, layout, norm_type):
    assert run_ranks(2, clip_one_bad_element, layout, norm_type) == [False, False]


def clip_by_policy():
    mesh = init_device_mesh("cpu", (2,))
    norms = []
    for policy in ("all", "adamw_only"):
        weight, bias = parameter(seeded((5, 4), 0), mesh, [S(0)]), parameter(seeded((3,), 1))
        groups = [{"params": [weight]}, {"params": [bias], "algorithm": "adamw"}]
        norm = dmuon.clip_grad_norm_(dmuon.Muon(groups), MAX_NORM, policy=policy)
        scale = MAX_NORM / norm.item()
        muon_scale = scale if policy == "all" else 1.0
        torch.testing.assert_close(weight.grad.full_tensor(), seeded((5, 4), 0) * muon_scale)
        torch.testing.assert_close(bias.grad, seeded((3,), 1) * scale)
        norms.append(norm.item())
    assert norms[0] == norms[1]


def test_the_norm_of_a_policy_is_the_same_on_every_rank(run_ranks):
    run_ranks(2, clip_by_policy)
