"""Whether all ranks have finite gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from dmuon.layout.local import has_grad, local_grad
from dmuon.plan.plan import Domain
from dmuon.step.parameters import PlannedParam
from dmuon.step.planned import Planned
from dmuon.transport.agreement import gather, maxima
from dmuon.transport.groups import Groups


def first_nonfinite(params: Iterable[PlannedParam]) -> str | None:
    """Name of the first parameter whose gradient has an infinite or NaN element on this rank.

    Blocks: the host waits for the device.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    names = {}
    for i, p in enumerate(params):
        if has_grad(p.param) and (grad := local_grad(p.param)).numel():
            names[i] = p.fqn
            by_kind.setdefault((grad.device, grad.dtype), {})[i] = grad
    found: list[int] = []
    for grads in by_kind.values():
        # The largest entry is infinite or NaN exactly if any entry is.
        largest = torch.stack(torch._foreach_norm(list(grads.values()), torch.inf))
        finite = zip(grads, largest.isfinite().tolist(), strict=True)
        found += [i for i, ok in finite if not ok]
    return names[min(found)] if found else None


def nonfinite_param(groups: Groups, job: Domain, planned: Planned, *, name_it: bool) -> str | None:
    """Find a parameter whose gradient has an infinite or NaN element on some rank.

    Args:
        groups: Process groups.
        job: Ranks that take a step together.
        planned: The parameters.
        name_it: Return the parameter's name on all ranks; else only whether there is one.

    Returns:
        None if all gradients are finite.

    Blocks: the host waits for the device.

    Collective: all ranks of the job.
    """
    fqn = first_nonfinite(planned.everyone)
    (found,) = maxima(groups, job, [fqn is not None])
    if not found:
        return None
    if name_it:
        names = cast("dict[int, str | None]", gather(groups, job, fqn))
        return next(name for name in names.values() if name is not None)
    return fqn or "a parameter of another rank"
