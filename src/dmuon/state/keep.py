"""State that follows its parameter: its device, its precision, and whether it is there at all."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.algorithms import ALGORITHMS, StateKind
from dmuon.layout.local import local
from dmuon.options import Settings
from dmuon.state.initial import HALF, MASTER, new_state


def keep_up(
    param: Tensor,
    group: Mapping[str, Any],
    state: MutableMapping[str, Any],
    settings: Settings,
) -> None:
    """Make what a parameter's state lacks, and move the rest to where the parameter is now.

    What others keep there stays.

    Args:
        param: The parameter.
        group: Its group.
        state: Its state.
        settings: What state is made of; see `new_state`.

    Modifies: `state`.
    """
    algorithm = ALGORITHMS[group["algorithm"]]
    kinds = algorithm.state
    wanted = [*kinds, MASTER] if settings.master_weights and param.dtype in HALF else [*kinds]
    if MASTER not in wanted:
        state.pop(MASTER, None)
    device = local(param).device
    dtype = torch.float32 if MASTER in wanted else param.dtype
    lost = {key for key in wanted if key not in state}
    for key in wanted:
        if key in lost or kinds.get(key) is StateKind.COUNT:
            continue
        found = local(state[key])
        # Never to fewer bits: those may come back.
        wide = torch.promote_types(found.dtype, algorithm.dtype_of(key, dtype))
        if found.is_meta and device.type != "meta":
            lost.add(key)  # a parameter that was there has no past
        elif (found.device, found.dtype) != (device, wide):
            state[key] = _moved(state[key], param, device, wide)
    if lost:
        made = new_state(param, group, settings)
        state.update({key: made[key] for key in made if key in lost})


def _moved(tensor: Tensor, param: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if not isinstance(tensor, DTensor) or not isinstance(param, DTensor):
        return tensor.to(device, dtype)
    return DTensor.from_local(
        tensor.to_local().to(device, dtype),
        param.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
