"""Gradient norm and clipping over parameters of any mix of meshes and plain tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dmuon.layout.local import has_grad, local, local_grad
from dmuon.layout.placements import ranks_of, read_layout, wire_device
from dmuon.options import param_names
from dmuon.plan.fingerprint import Description, digest
from dmuon.plan.plan import Domain
from dmuon.transport.agreement import DIGEST_SIZE
from dmuon.transport.groups import Groups
from dmuon.transport.settle import settle_gradients

Policy = Literal["all", "adamw_only"]


@torch.no_grad()
def clip_grad_norm_(
    optimizer_or_params: Optimizer | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    policy: Policy = "all",
    error_if_nonfinite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients so that their norm over the whole model is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` for models whose parameters lie on several meshes, or are
    partly plain tensors. Each element counts once, however many ranks store it, so the norm is
    that of one process. Gradients are multiplied by `min(1, max_norm / (norm + 1e-6))`.

    The update of a Muon parameter does not depend on the scale of its gradient within one step;
    clipping only changes how much the step weighs in the momentum. "adamw_only" leaves Muon
    gradients as they are; the norm is of all gradients either way.

    A plain tensor counts as replicated over the `process_group` of a `dmuon.Muon` that is given,
    else over the ranks of the DTensors beside it, else as this rank's own. Frozen parameters and
    parameters without gradient count as zero.

    Args:
        optimizer_or_params: The optimizer, or parameters.
        max_norm: Largest norm that is left alone; `inf` only measures.
        norm_type: The p of the p-norm, > 0; may be `inf`.
        policy: Which gradients are scaled: "all", or "adamw_only", those of the AdamW groups of
            the optimizer.
        error_if_nonfinite: Raise, on all ranks, if the norm is infinite or NaN. Waits for the
            device.
        group: Ranks that share the model and call together. By default this is the default
            process group if any parameter lies on several ranks, else this rank alone. Stages of
            a pipeline that hold plain tensors only need `dist.group.WORLD`.

    Returns:
        The norm before clipping, float32 of shape (), equal on all ranks. A NaN gradient gives NaN
        (infinity, if `norm_type` is).

    Raises:
        ValueError: `policy` is unknown, or "adamw_only" without an optimizer; `norm_type` is not
            positive.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.

    Modifies: the gradients.

    Collective: all ranks of `group`; one `all_reduce`.
    """
    groups = _groups(optimizer_or_params, policy)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be > 0, got {norm_type}")
    named = [
        pair
        for number, group_ in enumerate(groups)
        for pair in zip(param_names(group_, number), group_["params"], strict=True)
    ]
    process_group = getattr(optimizer_or_params, "process_group", None)
    _settle(named, process_group)
    norm = _norm([param for _, param in named], norm_type, process_group, group)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {norm.item()}, so gradients cannot be "
            "clipped; pass error_if_nonfinite=False to scale by it all the same"
        )
    _scale_(_scaled_params(groups, policy), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _norm(
    params: Sequence[Tensor],
    norm_type: float,
    process_group: dist.ProcessGroup | None,
    group: dist.ProcessGroup | None,
) -> Tensor:
    replicas, is_spread = _num_replicas(params, process_group)
    total = _local_total(params, replicas, norm_type)
    if group is not None or is_spread:
        op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        dist.all_reduce(total, op=op, group=group)
    return (total if math.isinf(norm_type) else total.pow(1 / norm_type)).float()


def _settle(named: Iterable[tuple[str, Tensor]], process_group: dist.ProcessGroup | None) -> None:
    """Add up gradients that are still `Partial`, in one order on all ranks.

    Collective: all ranks of each mesh, and of `process_group` if there are plain tensors.
    """
    members: dict[Domain, list[tuple[str, Tensor]]] = {}
    for name, param in sorted(named, key=lambda pair: pair[0]):
        if not isinstance(param, DTensor) or param.device_mesh.get_coordinate() is not None:
            domain = tuple(sorted(ranks_of(param, process_group)))
            members.setdefault(domain, []).append((name, param))

    def describe(domain: Domain) -> Description:
        return {name: (f"shape {tuple(param.shape)}", "") for name, param in members[domain]}

    groups = Groups.shared()
    groups.adopt((param for pairs in members.values() for _, param in pairs), process_group)
    settle_gradients(
        groups,
        dict(sorted(members.items(), key=lambda item: (len(item[0]), item[0]))),
        digest=lambda domain: digest(describe(domain))[:DIGEST_SIZE],
        describe=describe,
    )


def _groups(
    optimizer_or_params: Optimizer | Tensor | Iterable[Tensor], policy: Policy
) -> list[dict[str, Any]]:
    if policy not in ("all", "adamw_only"):
        raise ValueError(f"policy {policy!r} is unknown; use 'all' or 'adamw_only'")
    if isinstance(optimizer_or_params, Optimizer):
        return optimizer_or_params.param_groups
    if policy == "adamw_only":
        raise ValueError(
            "policy 'adamw_only' needs the optimizer, which knows the AdamW groups; pass it in "
            "place of the parameters"
        )
    if isinstance(optimizer_or_params, Tensor):
        optimizer_or_params = [optimizer_or_params]
    return [{"params": list(optimizer_or_params)}]


def _scaled_params(groups: Iterable[dict[str, Any]], policy: Policy) -> list[Tensor]:
    return [
        param
        for group in groups
        if policy == "all" or not group.get("use_muon", False)
        for param in group["params"]
    ]


def _num_replicas(
    params: Sequence[Tensor], process_group: dist.ProcessGroup | None
) -> tuple[list[int], bool]:
    """How many ranks store each element of each parameter; whether any parameter is spread."""
    # Read once per mesh and placements, which alone matter here.
    keys = [(p.device_mesh, p.placements) if isinstance(p, DTensor) else None for p in params]
    firsts = {key: param for key, param in zip(keys, params, strict=True) if key is not None}
    read = {key: read_layout("parameter", param) for key, param in firsts.items()}
    spanned = set[int]().union(*(layout.ranks for layout in read.values()))
    plain = max(len(spanned), 1) if process_group is None else process_group.size()
    replicas = [plain if key is None else read[key].num_replicas for key in keys]
    return replicas, max(plain, len(spanned)) > 1


def _local_total(params: Sequence[Tensor], replicas: Sequence[int], norm_type: float) -> Tensor:
    """This rank's share of `norm ** norm_type`, or of the norm itself if that is infinite."""
    shards: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = defaultdict(list)
    for param, num_replicas in zip(params, replicas, strict=True):
        if has_grad(param):
            shard = local_grad(param)
            if shard.numel():
                shards[shard.device, shard.dtype, num_replicas].append(shard)
    device = _reduction_device(params)
    total = torch.zeros((), dtype=_wide_dtype(device), device=device)
    for (_, dtype, num_replicas), tensors in shards.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(tensors, norm_type, dtype=wide))
        if math.isinf(norm_type):
            # A reduction by maximum may lose a NaN.
            total = total.maximum(norms.nan_to_num(math.inf, math.inf).max().to(total))
        else:
            # Every replica adds its part, so that a NaN in any of them shows.
            total += (norms.to(total.dtype) ** norm_type).sum().to(device) / num_replicas
    return total


def _scale_(params: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients, as they are: a `Partial` one scales like its sum."""
    shards: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for param in params:
        if has_grad(param):
            shard = local(cast("Tensor", param.grad))
            shards[shard.device, shard.dtype].append(shard)
    for (device, _), tensors in shards.items():
        torch._foreach_mul_(tensors, factor.to(device))


def _reduction_device(params: Sequence[Tensor]) -> torch.device:
    """Where ranks talk to each other: the device of the mesh, also under CPU offload."""
    anchors = [param for param in params if isinstance(param, DTensor)] or params
    return wire_device(anchors[0]) if anchors else torch.device("cpu")


def _wide_dtype(device: torch.device) -> torch.dtype:
    """A dtype in which squares of float32 norms do not overflow, where there is one."""
    return torch.float32 if device.type == "mps" else torch.float64
