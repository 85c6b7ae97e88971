"""State that follows its parameter: its device, its dtype, and whether it is there at all."""

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
    kinds = ALGORITHMS[group["algorithm"]].state
    device = local(param).device
    keys = [key for key, kind in kinds.items() if kind is not StateKind.COUNT]
    keys += [MASTER] * (MASTER in state)
    wrong = [key for key in keys if key in state and local(state[key]).device != device]
    # Of a tensor on the meta device nothing can be moved: a parameter that was there has no past.
    lost = [key for key in wrong if local(state[key]).is_meta]
    for key in wrong:
        if key not in lost:
            state[key] = _moved(state[key], param, device)
    missing = [key for key in kinds if key not in state]
    if settings.master_weights and param.dtype in HALF and MASTER not in state:
        missing.append(MASTER)
    if missing or lost:
        made = new_state(param, group, settings)
        state.update({key: made[key] for key in (*missing, *lost) if key in made})


def _moved(tensor: Tensor, param: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, DTensor) or not isinstance(param, DTensor):
        return tensor.to(device)
    return DTensor.from_local(
        tensor.to_local().to(device),
        param.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
