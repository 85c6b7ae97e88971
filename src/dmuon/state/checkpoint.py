"""What a state dict needs beyond torch's own: plain values on the way out, checks on the way in.

A group of a state dict holds two kinds of values. Hyperparameters come from the checkpoint, as in
any torch optimizer. Facts about the model (which algorithm a parameter has, how it splits into
matrices, its name) stay those of the optimizer that loads: the state is elementwise, so it serves
any split.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.algorithms import ALGORITHMS
from dmuon.layout.placements import read_layout
from dmuon.options import ROUTING_DEFAULTS, check_hyperparameters, param_names, plain_values
from dmuon.state.initial import MASTER

_MODEL_FACTS = ("param_names", "algorithm", *ROUTING_DEFAULTS)
_FUNCTION = "function "
_OURS = {MASTER, *(key for algorithm in ALGORITHMS.values() for key in algorithm.state)}


@dataclass(frozen=True, slots=True)
class Fitted:
    """Loaded state; torch would cast a bare tensor to the dtype of its parameter."""

    tensor: Tensor


def unwrap_fitted_(state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Put the tensors in the places of `Fitted`, once torch has loaded them.

    Modifies: `state`.
    """
    for values in state.values():
        values.update({k: v.tensor for k, v in values.items() if isinstance(v, Fitted)})


def pack_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group of a state dict with values that every kind of checkpoint can hold.

    `get_optimizer_state_dict` refuses a dtype, and no pickle holds a lambda.
    """
    packed = plain_values(group)
    if packed["ns_dtype"] is not None:
        packed["ns_dtype"] = str(packed["ns_dtype"]).removeprefix("torch.")
    scale = packed["adjust_lr_fn"]
    if callable(scale):
        name = getattr(scale, "__qualname__", type(scale).__qualname__)
        packed["adjust_lr_fn"] = f"{_FUNCTION}{name}"
    return packed


def fit_state_dict(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    state_of: Callable[[Tensor, Mapping[str, Any]], Mapping[str, Tensor]],
) -> dict[str, Any]:
    """Fit a state dict to an optimizer, before anything of the optimizer changes.

    Args:
        state_dict: As `torch.optim.Optimizer.load_state_dict` takes it.
        groups: The optimizer's groups.
        state_of: Gives the state of a parameter of a group, for its shapes, dtypes and layouts.

    Returns:
        A state dict with merged groups, and with state that has the optimizer's own dtypes and
        layouts.

    Raises:
        ValueError: It belongs to other parameters, to the other algorithm, or to another layout.
    """
    saved_groups: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
    if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in groups]:
        return dict(state_dict)  # torch says what is wrong
    _check_order(saved_groups, groups)
    merged, state = [], dict(state_dict["state"])
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        merged.append(_merge_group(saved, group, number))
        names = param_names(group, number)
        for key, name, param in zip(saved["params"], names, group["params"], strict=True):
            if key in state:
                keys = ALGORITHMS[group["algorithm"]].state
                state[key] = _fit_state(name, state[key], state_of(param, group), keys)
    return {**state_dict, "state": state, "param_groups": merged}


def _check_order(
    saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Parameters of a plain state dict are numbered, so their order must be the same."""
    if not all(isinstance(key, int) for group in saved_groups for key in group["params"]):
        return
    saved, names = (
        [*itertools.chain.from_iterable(group.get("param_names", ()) for group in side)]
        for side in (saved_groups, groups)
    )
    if saved != names and sorted(saved) == sorted(names):
        mine, theirs = next((a, b) for a, b in zip(names, saved, strict=True) if a != b)
        raise ValueError(
            f"{mine}: the state dict has the parameters in another order, with {theirs} in this "
            "place; load it by name, with torch.distributed.checkpoint.state_dict."
            "set_optimizer_state_dict"
        )


def _merge_group(saved: Mapping[str, Any], group: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Hyperparameters as saved; facts about the model, and what was not saved, as they are."""
    where = f"parameter group {number}"
    # Before 0.2 a group had only one of two algorithms, and `use_muon` said which.
    names = {True: "muon", False: "adamw", None: group["algorithm"]}
    was = saved.get("algorithm", names[saved.get("use_muon")])
    if was != group["algorithm"]:
        raise ValueError(
            f"{where}: it was saved as {was} and is {group['algorithm']} now; route its parameters "
            "as when the checkpoint was written"
        )
    if not saved.keys() - {"params"}:
        warnings.warn(
            f"{where}: the state dict has no hyperparameters for it, because its parameters were "
            "grouped otherwise when it was saved; those of the optimizer stay. Save and load with "
            "StateDictOptions(flatten_optimizer_state_dict=True) to take the saved ones",
            UserWarning,
            stacklevel=2,
        )
    merged = {**group, **saved}
    for key in _MODEL_FACTS:
        merged.pop(key, None)
        if key in group:
            merged[key] = group[key]
    if isinstance(merged["ns_dtype"], str):
        merged["ns_dtype"] = getattr(torch, merged["ns_dtype"], merged["ns_dtype"])
    scale = merged["adjust_lr_fn"]
    if isinstance(scale, str) and scale.startswith(_FUNCTION):
        if not callable(group["adjust_lr_fn"]):
            raise ValueError(
                f"{where}: the checkpoint was written with adjust_lr_fn={scale!r}, which it "
                "cannot hold; give the optimizer that function"
            )
        merged["adjust_lr_fn"] = group["adjust_lr_fn"]
    check_hyperparameters(merged, where)
    return merged


def _fit_state(
    name: str, saved: Mapping[str, Any], state: Mapping[str, Tensor], keys: Iterable[str]
) -> dict[str, Any]:
    """The saved state of one parameter; empty if none was saved, so that it starts afresh.

    What others keep beside it is left to torch.
    """
    # A flattened state dict gives an empty dict for what was not saved.
    found = {key for key, value in saved.items() if not isinstance(value, Mapping)}
    missing = sorted({*keys} - found)
    foreign = {key: saved[key] for key in sorted(found - _OURS)}
    if not found & _OURS:
        return foreign
    if missing:
        raise ValueError(
            f"{name}: the checkpoint has {', '.join(sorted(found))} for it but not "
            f"{', '.join(missing)}; route it to Muon or AdamW as when the checkpoint was written, "
            "or remove its entry from the checkpoint to start its state afresh"
        )
    ours = {key: like for key, like in state.items() if key in (*keys, MASTER)}
    fitted = {
        key: Fitted(_fit(f"{name}: {key}", saved[key], like) if key in found else like)
        for key, like in ours.items()
    }
    return {**foreign, **fitted}


def _fit(name: str, value: Any, like: Tensor) -> Tensor:  # noqa: ANN401 - a number or a tensor
    """A saved tensor in the dtype, device and layout of `like`."""
    if not isinstance(value, Tensor):
        value = torch.as_tensor(value)
    value = value.detach()
    if value.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} in the checkpoint, but {tuple(like.shape)} is "
            "needed; it belongs to another model"
        )
    local = _local_value(name, value, like).to(dtype=like.dtype, device=like.device)
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _local_value(name: str, value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a saved tensor."""
    if not isinstance(value, DTensor):
        return _cut(value, name, like) if isinstance(like, DTensor) else value
    if not isinstance(like, DTensor) or read_layout(name, value) != read_layout(name, like):
        layout = read_layout(name, like) if isinstance(like, DTensor) else "a plain tensor"
        raise ValueError(
            f"{name} was saved as {read_layout(name, value)}, but {layout} is needed; save and "
            "load through torch.distributed.checkpoint, which reshards, or save whole tensors "
            "with StateDictOptions(full_state_dict=True)"
        )
    return value.to_local()


def _cut(whole: Tensor, name: str, like: DTensor) -> Tensor:
    """Copy of what this rank stores of a whole tensor."""
    layout, rank = read_layout(name, like), dist.get_rank()
    if rank not in layout.ranks:
        return like.to_local()
    for dim, runs in enumerate(layout.local_runs(rank)):
        parts = [whole.narrow(dim, start, stop - start) for start, stop in runs or ((0, 0),)]
        whole = torch.cat(parts, dim)
    return whole
