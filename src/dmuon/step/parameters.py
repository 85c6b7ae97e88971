"""The parameters as a plan sees them: from groups to requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.algorithms import ALGORITHMS, Algorithm, StateKind
from dmuon.layout.layout import Layout
from dmuon.layout.matrices import Block, Matrix, matrices_of
from dmuon.layout.placements import ranks_of, read_layout, wire_device
from dmuon.newton_schulz import Method, resolve_coefficients
from dmuon.newton_schulz.method import check_precision, dtype_name
from dmuon.options import at, scales_of
from dmuon.plan.plan import Cargo, Domain, Request
from dmuon.state.initial import MASTER
from dmuon.state.managed import NamedParam


@dataclass(frozen=True, slots=True)
class PlannedParam:
    """One parameter that a step may change.

    Attributes:
        fqn: Fully qualified name.
        param: The parameter.
        group: Its parameter group.
        state: Its state.
        source: Layout of its momentum; of itself, if its algorithm works element by element.
        target: Layout of itself.
        rows: Layouts of the state that travels with its matrices, by key.
        device: Where its matrices travel and are orthogonalized.
    """

    fqn: str
    param: Tensor
    group: dict[str, Any]
    state: Mapping[str, Tensor]
    source: Layout
    target: Layout
    rows: Mapping[str, Layout]
    device: torch.device

    @classmethod
    def read(
        cls,
        named: NamedParam,
        state: Mapping[str, Tensor],
        process_group: dist.ProcessGroup | None,
    ) -> PlannedParam:
        """Read the layouts of a parameter and its state.

        Raises:
            ValueError: They cannot be optimized, or do not belong together.
        """
        fqn, param, group = named
        algorithm = ALGORITHMS[group["algorithm"]]
        key = algorithm.gathered[0]
        source, target = _read_layouts(named, state, key, process_group)
        rows = {
            key: read_layout(f"{fqn}: {key}", state[key], process_group)
            for key in algorithm.keys(StateKind.ROWS, StateKind.COLS)
        }
        return cls(fqn, param, group, state, source, target, rows, wire_device(param))

    @property
    def algorithm(self) -> Algorithm:
        """What optimizes it."""
        return ALGORITHMS[self.group["algorithm"]]

    @property
    def weight(self) -> Tensor:
        """What a step changes: the parameter, or its master weight."""
        return self.state.get(MASTER, self.param)

    @property
    def domain(self) -> Domain:
        """Ranks that store any part of it."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    def requests(self) -> Iterator[Request]:
        """Its matrices, as the planner takes them."""
        method = self._method()
        # float16 would overflow on the way: a gradient is only normalized at its owner.
        wire = torch.bfloat16 if method.dtype == torch.float16 else method.dtype
        scales = scales_of(self.group, self.param.shape)
        options = {key: self.group[key] for key in self.algorithm.options}
        stages = self.algorithm.matrices
        assert stages
        dtypes = [str(self.state[key].dtype) for key in self.rows]
        finish = "" if stages.is_plain else f"{self.algorithm.name} {options} {dtypes}"
        for matrix in self._matrices():
            yield Request(
                matrix,
                self.source,
                self.target,
                wire_dtype=dtype_name(wire),
                ns_dtype=method.dtype_name,
                device_type=self.device.type,
                method=method,
                steps=method.steps,
                scale=scales[matrix.shape],
                finish=finish,
                sums=stages.sums,
                rows=tuple(self._cargo(matrix, key, wire) for key in self.rows),
            )

    def _matrices(self) -> Iterator[Matrix]:
        flatten, split = self.group["flatten"], self.group["split"]
        for matrix in matrices_of(self.fqn, self.param.shape, flatten=flatten, split=split):
            if matrix.numel:
                yield matrix

    def _method(self) -> Method:
        dtype = self.group["ns_dtype"]
        if dtype is None:
            dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        coefficients = resolve_coefficients(self.group["ns_coefficients"], self.group["ns_steps"])
        with at(f"{self.fqn}: ns_dtype {dtype}"):
            check_precision(coefficients, dtype)
        return Method(coefficients, self.group["eps"], dtype, bool(self.group.get("aol")))

    def _cargo(self, matrix: Matrix, key: str, wire: torch.dtype) -> Cargo:
        """The rows or columns of a state that belong to a matrix, as elements of the wire dtype.

        Blocks of columns have their rows side by side in the state; blocks of rows their columns.
        """
        layout = self.rows[key]
        width = max(1, self.state[key].dtype.itemsize // wire.itemsize)
        layout = replace(layout, shape=(*layout.shape[:-1], layout.shape[-1] * width))
        sizes, dim = self.group["split"] or ((), 0)
        lines, across = matrix.block.rows, matrix.block.cols
        if self.algorithm.state[key] is StateKind.COLS:
            lines, across, dim = across, lines, 1 - dim
        starts = [sum(sizes[:i]) for i in range(len(sizes))] if dim == 1 and sizes else [0]
        number = starts.index(across[0])
        side_by_side = number * width, (number + 1) * width
        return Cargo(key, layout, layout, Block(matrix.block.batch, lines, side_by_side))


def signature(
    named: Iterable[NamedParam], state: Mapping[Tensor, Mapping[str, Tensor]]
) -> list[object]:
    """Everything a plan depends on, or holds on to, that may change between steps."""
    named = list(named)
    # Facts of a group are read once, not once for each of its parameters.
    groups = {id(group): group for _, _, group in named}
    params = [
        (
            id(param),
            id(group),
            [id(tensor) for tensor in state.get(param, {}).values()],
            # A parameter that was frozen when the optimizer was built gets its state now.
            param.requires_grad,
            param.shape,
            param.dtype,
            param.device,
            (param.device_mesh, param.placements) if isinstance(param, DTensor) else None,
        )
        for _, param, group in named
    ]
    return [[facts(group) for group in groups.values()], params]


def facts(group: Mapping[str, Any]) -> list[object]:
    """What a plan depends on of a group."""
    options = ALGORITHMS[group["algorithm"]].options
    keys = ("ns_coefficients", "ns_steps", "eps", "ns_dtype", "adjust_lr_fn", *options)
    return [group[key] for key in ("algorithm", "use_muon", "flatten", "split", *keys)]


def domains_of(
    named: Iterable[NamedParam], process_group: dist.ProcessGroup | None
) -> list[Domain]:
    """The rank sets of all parameters that this rank stores a part of, smallest first; never fails.

    Frozen parameters count: another rank may not have frozen them.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {tuple(sorted(ranks_of(param, process_group))) for _, param, _ in named}
    return sorted((d for d in found if rank in d), key=lambda domain: (len(domain), domain))


def _read_layouts(
    named: NamedParam,
    state: Mapping[str, Tensor],
    key: str,
    process_group: dist.ProcessGroup | None,
) -> tuple[Layout, Layout]:
    """Layouts of a parameter's state and of the parameter.

    Raises:
        ValueError: The parameter is another than its state was made for.
    """
    fqn, param, _ = named
    target = read_layout(fqn, param, process_group)
    if key in state:
        source = read_layout(fqn, state[key], process_group)
        replicated = all(placement is None for placement in target.placements)
        if source == target:
            return target, target  # one object, which compares with itself at no cost
        if source.shape == target.shape and replicated:
            return source, target
    raise ValueError(
        f"{fqn}: the shape, layout or algorithm of this parameter was changed under its optimizer "
        f"state (it is {target.shape} on {target}). Remove its entry from optimizer.state to "
        "start its state afresh, or load a state dict that was saved before the change"
    )
