"""What an algorithm is: plain data that a step reads.

[Note: where a stage runs] Elementwise stages run on the pieces, before and after the exchange.
What needs a whole matrix runs at its owner, which has it anyway: its rows, its norms and its
singular values cost no further collective. State of one value per row therefore travels with the
piece that holds the row, to the owner and back, and is stored like the parameter's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

Group = Mapping[str, Any]
States = Mapping[str, Sequence[Tensor]]


# Of state that travels: its increments are too small for half precision.
ROWS_DTYPE = torch.float32


class StateKind(Enum):
    """What one state of a parameter holds.

    Attributes:
        ELEMENTS: One value per element, in the dtype and layout of the parameter.
        ROWS: One value per row of each matrix, in float32; travels with the matrix.
        COUNT: One float32 number.
    """

    ELEMENTS = "elements"
    ROWS = "rows"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class Matrices:
    """The stages of an algorithm that works on whole matrices; between them is Newton-Schulz.

    Attributes:
        advance: `(grads, states, group)` takes new gradients into the state, in place; all
            tensors are local and of one group.
        inputs: `(grads, states, group)` gives what is orthogonalized: new tensors or state.
        finish: `(result_BMN, states, group)` changes orthogonalized matrices in place at their
            owner; `states` holds (B, M, 1) stacks of each ROWS state, also changed in place.
        apply: `(params, updates, *, scale, lr, weight_decay)` takes the step on local tensors.
    """

    advance: Callable[[Sequence[Tensor], States, Group], None]
    inputs: Callable[[Sequence[Tensor], States, Group], Sequence[Tensor]]
    apply: Callable[..., None]
    finish: Callable[[Tensor, Mapping[str, Tensor], Group], None] | None = None


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One variant: what it remembers, and what runs on pieces and on whole matrices.

    Attributes:
        name: What `group["algorithm"]` says.
        state: Its state by key.
        stages: For an algorithm of whole matrices; or, for an elementwise one, a function
            `(params, grads, states, group)` that takes the whole step in place.
        options: Hyperparameters that only this algorithm has, with their defaults: numbers in
            [0, 1).
        hyperparameters: Those of all that it reads; ranks compare them.
    """

    name: str
    state: Mapping[str, StateKind]
    stages: Matrices | Callable[[Sequence[Tensor], Sequence[Tensor], States, Group], None]
    options: Mapping[str, float] = field(default_factory=dict)
    hyperparameters: tuple[str, ...] = ()

    @property
    def matrices(self) -> Matrices | None:
        """Its stages if it works on whole matrices."""
        return self.stages if isinstance(self.stages, Matrices) else None

    def keys(self, kind: StateKind) -> list[str]:
        """Keys of the state of one kind."""
        return [key for key, found in self.state.items() if found is kind]
