"""Steps that need numbers of whole matrices first, such as norms: one collective for a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dmuon.plan.plan import Request
from dmuon.plan.program import Program

if TYPE_CHECKING:
    from dmuon.step.bucket import Members


@dataclass(frozen=True, slots=True)
class Steps:
    """Updates of slabs, ready to be taken."""

    members: Members
    params: Sequence[Tensor]
    updates: Sequence[Tensor]

    def take(self, **totals: Any) -> None:  # noqa: ANN401 - see `Matrices.apply`
        """Change the parameters."""
        group, scale = self.members.group, self.members.scale
        settings = {"lr": group["lr"], "weight_decay": group["weight_decay"], **totals}
        self.members.stages.apply(self.params, self.updates, scale=scale, **settings)


@dataclass(frozen=True, slots=True)
class Sums:
    """What is added up over each matrix of a bucket, and the steps that wait for it.

    Attributes:
        requests: The matrices.
        values: Sums, (matrices, sums), on the device of the bucket.
        waiting: The steps.
    """

    requests: Sequence[Request]
    values: Tensor
    waiting: list[Steps] = field(default_factory=list)

    @classmethod
    def of(cls, program: Program, device: torch.device, dtype: torch.dtype) -> Sums:
        """Zeros."""
        requests = [a.request for a in program.bucket.assignments]
        return cls(
            requests, torch.zeros(len(requests), program.num_sums, device=device, dtype=dtype)
        )

    def add(self, steps: Steps) -> None:
        """Keep steps; add what this rank has of their matrices, and of copies one rank alone."""
        self.waiting.append(steps)
        members = steps.members
        if members.counted:
            assert members.stages.measure
            params, updates = (
                [side[i] for i in members.counted] for side in (steps.params, steps.updates)
            )
            found = members.stages.measure(params, updates)
            self.values[members.counted_positions, : found.shape[1]] += found.to(self.values)

    def take(self, *, check: bool) -> None:
        """Take the steps, once all ranks have added up theirs.

        Args:
            check: Whether to look for radii of zero, which waits for the device.

        Raises:
            ValueError: The weights of a matrix are zero and must not be; on all ranks.
        """
        for i, request in enumerate(self.requests if check else ()):
            if request.sums[:1] == ("radius",) and not self.values[i, 0]:
                raise ValueError(
                    f"{request.matrix}: its weights are all zero, so an algorithm that keeps their "
                    "norm would never change them; initialize them, or use another algorithm"
                )
        for steps in self.waiting:
            members = steps.members
            totals = self.values[members.positions, : len(members.stages.sums)]
            positions = [slab.position or 0 for slab in members.slabs]
            shapes = [self.requests[position].matrix.shape for position in positions]
            totals = totals.to(steps.params[0].device)
            steps.take(totals=totals, shapes=shapes, group=members.group)
