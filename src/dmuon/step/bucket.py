"""One bucket's life, which reads top to bottom and yields where it would wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dmuon.algorithms import Algorithm, Matrices, StateKind
from dmuon.newton_schulz import Backend, Method, exact_arithmetic, orthogonalize_stack
from dmuon.plan.copies import Copy
from dmuon.plan.program import Batch, Flat, Program, Slab, Stack
from dmuon.step.buffers import collect, copy_, flatten, packed, unflatten, unpacked
from dmuon.step.parameters import PlannedParam
from dmuon.step.sums import Steps, Sums
from dmuon.transport.exchange import Exchange

Life = Iterator[None]
# A flat buffer with copies that are taken from it.
Source = tuple[Tensor, Sequence[Copy]]


@dataclass(frozen=True, slots=True)
class Shards:
    """What this rank stores of every parameter that takes part in a step, by name.

    Attributes:
        weights: Local parameters, or master weights.
        grads: Local gradients, cut as the momentum is.
        states: Local state, by key and name.
    """

    weights: Mapping[str, Tensor]
    grads: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]]

    def cut(self, slabs: Iterable[Slab], tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The part of local tensors that each slab is."""
        return [tensors[s.fqn][s.index] if s.index else tensors[s.fqn] for s in slabs]


@dataclass(slots=True)
class StepStats:
    """What one rank did in one step.

    Attributes:
        ns_matrices: Matrices that this rank orthogonalized.
        bytes_sent: Bytes of pieces that this rank sent to other ranks.
        num_collectives: Exchanges that this rank took part in.
    """

    ns_matrices: int = 0
    bytes_sent: int = 0
    num_collectives: int = 0


@dataclass(frozen=True, slots=True)
class Members:
    """Slabs of one flat buffer that one foreach call can take: one group, one scale.

    Attributes:
        group: The group.
        algorithm: Its algorithm.
        scale: Factor on its learning rate.
        indices: Which slabs of the buffer.
        slabs: Those.
        positions: Where the sums of their matrices lie, if anything is summed; on the device.
        counted: Which of them this rank counts; others count the other copies.
        counted_positions: `positions` of those.
    """

    group: dict[str, Any]
    algorithm: Algorithm
    scale: float
    indices: tuple[int, ...]
    slabs: tuple[Slab, ...]
    positions: Tensor | None
    counted: tuple[int, ...]
    counted_positions: Tensor | None

    @property
    def stages(self) -> Matrices:
        """Those of the algorithm."""
        assert self.algorithm.matrices
        return self.algorithm.matrices


@dataclass(frozen=True, slots=True)
class BatchRun:
    """How a batch is orthogonalized here: what follows from its group and this rank's device."""

    method: Method
    backend: Backend
    parts: int
    group: dict[str, Any]
    stages: Matrices
    dtypes: Mapping[str, torch.dtype]


@dataclass(frozen=True, slots=True)
class LocalBucket:
    """A program bound to this rank's groups, device and backends.

    Attributes:
        program: The program.
        device: Where the bucket travels and its matrices are orthogonalized.
        dtype: dtype of the wire.
        idle: Members of `program.idle`.
        inputs: Members of `program.inputs`.
        stays: Members of `program.stays`.
        arrivals: Members of `program.arrivals`.
        batches: How each batch of the program runs.
        has_radii: Empty until weights that must not be zero were seen not to be.
    """

    program: Program
    device: torch.device
    dtype: torch.dtype
    idle: tuple[Members, ...]
    inputs: tuple[Members, ...]
    stays: tuple[Members, ...]
    arrivals: tuple[Members, ...]
    batches: tuple[BatchRun, ...]
    has_radii: list[bool] = field(default_factory=list)

    @classmethod
    def bind(
        cls,
        program: Program,
        params: Mapping[str, PlannedParam],
        device: torch.device,
        choose: Callable[[Method, tuple[int, int, int]], tuple[Backend, int]],
    ) -> LocalBucket:
        """Look up all that a step would otherwise look up.

        Args:
            program: The program.
            params: Parameters by name.
            device: Where the bucket travels.
            choose: Gives the backend and the number of parts for a stack.
        """
        batches = []
        for batch in program.batches:
            first, method = params[batch.request.matrix.fqn], batch.request.method
            assert isinstance(method, Method)
            assert first.algorithm.matrices
            backend, parts = choose(method, batch.stacks[""].shape)
            stages = first.algorithm.matrices
            dtypes = {key: first.state[key].dtype for key in first.rows}
            batches.append(BatchRun(method, backend, parts, first.group, stages, dtypes))
        idle, inputs, stays, arrivals = (
            tuple(_members(slabs, params, device))
            for slabs in (
                program.idle,
                program.inputs.slabs,
                program.stays.slabs,
                program.arrivals.slabs,
            )
        )
        return cls(
            program,
            device,
            dtype=getattr(torch, program.bucket.wire_dtype),
            idle=idle,
            inputs=inputs,
            stays=stays,
            arrivals=arrivals,
            batches=tuple(batches),
        )

    def advance(self, shards: Shards) -> Tensor:
        """Take the gradients into the state; return what is orthogonalized, flat."""
        for members in self.idle:
            _advance(members, shards)
        flat = self.program.inputs
        tensors: dict[int, Tensor] = {}
        for members in self.inputs:
            grads, states = _advance(members, shards)
            found = members.stages.inputs(grads, states, members.group)
            tensors |= zip(members.indices, found, strict=True)
        for i, slab in enumerate(flat.slabs):
            if slab.key:
                tensors[i] = self._state(slab, shards)
        ordered = [tensors[i] for i in range(len(flat.slabs))]
        return flatten(ordered, flat, self.dtype, self.device)

    def _state(self, slab: Slab, shards: Shards) -> Tensor:
        """A slab of state, its bytes as elements of the wire, in which slabs are counted."""
        tensor = shards.states[slab.key][slab.fqn]
        if self.dtype.itemsize < tensor.dtype.itemsize:
            tensor = tensor.view(self.dtype)
        return tensor[slab.index] if slab.index else tensor

    def assemble(self, inbox: Tensor, inputs: Tensor) -> list[dict[str, Tensor]]:
        """Fill the stacks of each batch, by key."""
        return [
            {
                key: self.collect(
                    math.prod(stack.shape),
                    [(inbox, stack.received), (inputs, stack.kept)],
                    is_padded=batch.is_padded,
                ).view(stack.shape)
                for key, stack in batch.stacks.items()
            }
            for batch in self.program.batches
        ]

    def orthogonalize(self, stacks: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Orthogonalize each batch, taking it from the list; the results, flat, by key."""
        with exact_arithmetic(self.device.type):
            return [
                self._orthogonalize(batch, run, stacks.pop(0))
                for batch, run in zip(self.program.batches, self.batches, strict=True)
            ]

    def _orthogonalize(
        self, batch: Batch, run: BatchRun, stacks: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        stack_BMN, stages = stacks.pop(""), run.stages
        if stages.prepare:
            stack_BMN = _logical(stages.prepare(_logical(stack_BMN, batch), run.group), batch)
        if stages.spectral:
            result_BMN = stages.spectral(stack_BMN, run.group, run.method.dtype)
        else:
            result_BMN = orthogonalize_stack(stack_BMN, run.method, run.backend, run.parts)
        if stages.finish:
            states = {key: unpacked(stack, run.dtypes[key]) for key, stack in stacks.items()}
            stages.finish(_logical(result_BMN, batch), states, run.group)
            stacks = {key: packed(state, self.dtype) for key, state in states.items()}
        return {key: stack.reshape(-1) for key, stack in {"": result_BMN, **stacks}.items()}

    def results(
        self, found: Sequence[Mapping[str, Tensor]], way: Callable[[Stack], Sequence[Copy]]
    ) -> list[Source]:
        """Results with the copies that take them one way."""
        pairs = [
            (flat, way(batch.stacks[key]))
            for batch, flats in zip(self.program.batches, found, strict=True)
            for key, flat in flats.items()
        ]
        return [(flat, copies) for flat, copies in pairs if copies]

    def apply(
        self,
        flat: Flat,
        grouped: Sequence[Members],
        buffer: Tensor,
        shards: Shards,
        sums: Sums | None,
    ) -> None:
        """Take the step along the updates of some slabs, and store their new state.

        What needs sums over whole matrices is left to `sums`.
        """
        updates = unflatten(buffer, flat)
        for members in grouped:
            steps = self._steps(members, updates, shards)
            if sums and members.stages.measure:
                sums.add(steps)
            else:
                steps.take()
        pairs = zip(flat.slabs, updates, strict=True)
        rows = [(self._state(slab, shards), update) for slab, update in pairs if slab.key]
        if rows:
            torch._foreach_copy_([state for state, _ in rows], [update for _, update in rows])

    def _steps(self, members: Members, updates: Sequence[Tensor], shards: Shards) -> Steps:
        params = shards.cut(members.slabs, shards.weights)
        steps: Sequence[Tensor] = [updates[i] for i in members.indices]
        if params[0].device != self.device:  # offloaded
            steps = [step.to(param.device) for step, param in zip(steps, params, strict=True)]
        if members.stages.after:
            keys = members.algorithm.keys(StateKind.UPDATES)
            states = {key: shards.cut(members.slabs, shards.states[key]) for key in keys}
            steps = members.stages.after(steps, states, members.group)
        return Steps(members, params, steps)

    def new_sums(self) -> Sums | None:
        """Where sums over the matrices of the bucket are added up; None if there are none."""
        if not self.program.num_sums:
            return None
        return Sums.of(self.program, self.device, torch.promote_types(self.dtype, torch.float32))

    def collect(
        self,
        numel: int,
        sources: Iterable[Source],
        *,
        is_padded: bool = False,
    ) -> Tensor:
        """A flat buffer of the wire's dtype; see `dmuon.step.buffers.collect`."""
        return collect(numel, sources, dtype=self.dtype, device=self.device, is_padded=is_padded)


def bucket_life(local: LocalBucket, shards: Shards, exchange: Exchange, stats: StepStats) -> Life:
    """Take one bucket through the step.

    Args:
        local: This rank's part in the bucket.
        shards: Local tensors of every parameter in it.
        exchange: Transport.
        stats: Counts the matrices that this rank orthogonalizes.
    """
    program = local.program
    domain = program.bucket.domain

    inputs = local.advance(shards)
    outbox = local.collect(program.gather.num_sent, [(inputs, program.pack)])
    flight = exchange.launch(domain, program.gather, outbox)
    del outbox
    yield
    stacks = local.assemble(flight.wait(), inputs)
    # Scratch is bounded by the bucket: no buffer outlives its stage.
    del inputs, flight
    found = local.orthogonalize(stacks)
    stats.ns_matrices += program.num_matrices

    outbox = local.collect(program.scatter.num_sent, local.results(found, lambda stack: stack.sent))
    stays = local.collect(program.stays.numel, local.results(found, lambda stack: stack.stays))
    kept = local.results(found, lambda stack: stack.arrives)
    arrivals = local.collect(program.arrivals.numel, kept) if kept else None
    flight = exchange.launch(domain, program.scatter, outbox)
    del found, kept, outbox
    sums = local.new_sums()
    local.apply(program.stays, local.stays, stays, shards, sums)
    del stays
    yield
    inbox = flight.wait()
    if arrivals is None:
        arrivals = local.collect(program.arrivals.numel, [(inbox, program.unpack)])
    else:
        copy_(arrivals, inbox, program.unpack)
    local.apply(program.arrivals, local.arrivals, arrivals, shards, sums)
    if sums:
        flight = exchange.add(domain, sums.values)
        yield
        flight.wait()
        sums.take(check=not local.has_radii)
        local.has_radii.append(True)


def _members(
    slabs: Sequence[Slab], params: Mapping[str, PlannedParam], device: torch.device
) -> Iterator[Members]:
    """Slabs of matrices that share a group and a scale."""
    found: dict[tuple[int, float], list[int]] = {}
    for i, slab in enumerate(slabs):
        if not slab.key:
            found.setdefault((id(params[slab.fqn].group), slab.scale), []).append(i)
    for (_, scale), indices in found.items():
        first = params[slabs[indices[0]].fqn]
        chosen = tuple(slabs[i] for i in indices)
        counted = tuple(i for i, slab in enumerate(chosen) if slab.is_counted)
        yield Members(
            *(first.group, first.algorithm, scale, tuple(indices), chosen),
            positions=_positions(chosen, device),
            counted=counted,
            counted_positions=_positions([chosen[i] for i in counted], device),
        )


def _advance(members: Members, shards: Shards) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Advance the state of slabs; return their gradients, in the dtype of the state, and state."""
    gathered, counts = members.algorithm.gathered, members.algorithm.keys(StateKind.COUNT)
    states = {key: shards.cut(members.slabs, shards.states[key]) for key in gathered}
    likes = states[gathered[0]]
    states |= {key: [shards.states[key][s.fqn] for s in members.slabs] for key in counts}
    grads = [
        grad if grad.dtype == like.dtype else grad.to(like.dtype)
        for grad, like in zip(shards.cut(members.slabs, shards.grads), likes, strict=True)
    ]
    members.stages.advance(grads, states, members.group)
    return grads, states


def _logical(stack_BMN: Tensor, batch: Batch) -> Tensor:
    """Matrices as they are, from a stack with the smaller side first, and back."""
    return stack_BMN.mT if batch.is_tall else stack_BMN


def _positions(slabs: Iterable[Slab], device: torch.device) -> Tensor | None:
    found = [slab.position for slab in slabs if slab.position is not None]
    return torch.tensor(found, device=device) if found else None
