"""From the parameters as they are now to a plan with this rank's part in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from dmuon.options import Settings
from dmuon.plan.build import build_plan
from dmuon.plan.cost import CostModel, Timings
from dmuon.state.managed import NamedParam
from dmuon.step.parameters import PlannedParam
from dmuon.step.planned import Planned


def make_planned(
    named: Iterable[NamedParam],
    state: Mapping[Tensor, Mapping[str, Tensor]],
    settings: Settings,
    timings: Timings,
    rank: int,
) -> Planned:
    """Plan the parameters that have state; one that has been frozen from the start has none.

    Raises:
        ValueError: A parameter cannot be optimized as it is; names it.
    """
    params = [
        PlannedParam.read(entry, state[entry[1]], settings.process_group)
        for entry in named
        if state.get(entry[1])
    ]
    # A rank may hold DTensors of meshes that it is no part of; it stores nothing of them.
    params = [p for p in params if rank in p.domain]
    plan = build_plan(
        [request for p in params if p.algorithm.matrices for request in p.requests()],
        bucket_bytes=settings.bucket_bytes,
        cost_model=CostModel(timings.seconds_per_step()),
        repeat=settings.repeat_ns,
    )
    options = f"nonfinite {settings.nonfinite}"
    return Planned(params, plan, timings=timings, rank=rank, options=options)
