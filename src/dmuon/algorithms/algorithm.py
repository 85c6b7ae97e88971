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


class StateKind(Enum):
    """What one state of a parameter holds.

    Attributes:
        ELEMENTS: One value per element, in the dtype and layout of the parameter; sharded over
            replicas by `shard_state`.
        UPDATES: One value per element, laid out as updates are, which is as the parameter.
        ROWS: One value per row of each matrix, in float32; travels with the matrix.
        COLS: One value per column of each matrix, likewise.
        COUNT: One float32 number; for matrices, the number of this step, counted by the step.
    """

    ELEMENTS = "elements"
    UPDATES = "updates"
    ROWS = "rows"
    COLS = "cols"
    COUNT = "count"


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of state whose small changes half precision would lose."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class Matrices:
    """The stages of an algorithm that works on whole matrices; between them is Newton-Schulz.

    Stages at the owner see matrices as they are, rows by columns, as stacks of equal shape.

    Attributes:
        advance: `(grads, states, group)` takes new gradients into the state, in place; all
            tensors are local and of one group.
        inputs: `(grads, states, group)` gives what is orthogonalized: new tensors or state.
        prepare: `(matrices_BMN, group)` gives what is orthogonalized instead, at its owner.
        spectral: `(stack_BMN, group, dtype)` replaces Newton-Schulz; transposed so that M <= N.
        finish: `(result_BMN, states, group)` changes orthogonalized matrices in place at their
            owner; `states` holds stacks of each ROWS (B, M, 1) and COLS (B, N, 1) state, also
            changed in place.
        after: `(updates, states, group)` gives other updates, on the pieces; `states` holds their
            UPDATES state, which it changes in place.
        sums: Names of what `measure` adds up over each matrix, in one collective per bucket; if
            the first is "radius", weights for which it is zero are refused.
        measure: `(params, updates)` gives the sums over each local piece, (pieces, sums).
        apply: `(params, updates, *, scale, lr, weight_decay)` takes the step on local tensors;
            with `sums`, also `totals`, (pieces, sums) over whole matrices, their `shapes`, and the
            `group`.
    """

    advance: Callable[[Sequence[Tensor], States, Group], None]
    inputs: Callable[[Sequence[Tensor], States, Group], Sequence[Tensor]]
    apply: Callable[..., None]
    finish: Callable[[Tensor, Mapping[str, Tensor], Group], None] | None = None
    prepare: Callable[[Tensor, Group], Tensor] | None = None
    spectral: Callable[[Tensor, Group, torch.dtype], Tensor] | None = None
    after: Callable[[Sequence[Tensor], States, Group], Sequence[Tensor]] | None = None
    sums: tuple[str, ...] = ()
    measure: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether its owners do nothing but orthogonalize."""
        return not (self.prepare or self.spectral or self.finish)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One variant: what it remembers, and what runs on pieces and on whole matrices.

    Attributes:
        name: What `group["algorithm"]` says.
        state: Its state by key.
        stages: For an algorithm of whole matrices; or, for an elementwise one, a function
            `(params, grads, states, group)` that takes the whole step in place.
        options: Hyperparameters that only this algorithm has, with their defaults: numbers >= 0.
        bounds: What an option must be less than, if that is not 1.
        hyperparameters: Those of all that it reads; ranks compare them.
        dtypes: The dtype of an ELEMENTS or UPDATES state from that of the parameter, where they
            differ.
    """

    name: str
    state: Mapping[str, StateKind]
    stages: Matrices | Callable[[Sequence[Tensor], Sequence[Tensor], States, Group], None]
    options: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)
    hyperparameters: tuple[str, ...] = ()
    dtypes: Mapping[str, Callable[[torch.dtype], torch.dtype]] = field(default_factory=dict)

    @property
    def matrices(self) -> Matrices | None:
        """Its stages if it works on whole matrices."""
        return self.stages if isinstance(self.stages, Matrices) else None

    @property
    def gathered(self) -> list[str]:
        """Keys of the state that gradients advance, laid out as what is gathered."""
        return self.keys(StateKind.ELEMENTS) or self.keys(StateKind.UPDATES)

    def dtype_of(self, key: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of one state of a parameter of a dtype."""
        if self.state.get(key) in {StateKind.ROWS, StateKind.COLS}:
            return torch.float32
        return self.dtypes[key](dtype) if key in self.dtypes else dtype

    def keys(self, *kinds: StateKind) -> list[str]:
        """Keys of the state of some kinds."""
        return [key for key, found in self.state.items() if found in kinds]
