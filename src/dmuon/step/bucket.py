"""One bucket's life, and the driver that overlaps buckets.

A bucket's life reads top to bottom: momentum, gather, orthogonalize, scatter, apply. It yields
where it would wait, so that the next bucket travels while this one is orthogonalized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon.algorithms.update import apply_, lr_scale, momentum_, nesterov
from dmuon.layout.matrices import Piece, Runs
from dmuon.newton_schulz import (
    Method,
    exact_arithmetic,
    orthogonalize_stack,
    resolve_coefficients,
)
from dmuon.plan.batches import batch_shapes, resolve_backend
from dmuon.plan.cost import Timings
from dmuon.plan.plan import Assignment, Bucket, Itinerary, Leg
from dmuon.transport.exchange import Exchange

Life = Iterator[None]
_DONE = object()


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What this rank stores of one Muon parameter, as local tensors.

    Attributes:
        param: Shard of the parameter.
        momentum: Shard of `momentum_buffer`.
        grad: Gradient, cut as the momentum is.
        group: Its parameter group, read afresh every step.
    """

    param: Tensor
    momentum: Tensor
    grad: Tensor
    group: Mapping[str, Any]


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


def drive(lives: Iterable[Life]) -> None:
    """Start each life before the one ahead of it goes on, and that before the one ahead of it.

    So one bucket is gathered while another is orthogonalized and the result of a third returns. The
    order of a domain's exchanges is the same on all its ranks.
    """
    live: list[Life] = []
    for life in lives:
        live = [each for each in (life, *live) if next(each, _DONE) is not _DONE]
    while live:
        live = [each for each in live if next(each, _DONE) is not _DONE]


def bucket_life(
    part: Itinerary,
    shards: Mapping[str, LocalShard],
    *,
    exchange: Exchange,
    device: torch.device,
    tuning: Timings,
    stats: StepStats,
) -> Life:
    """Take one bucket through the step.

    Args:
        part: This rank's part in the bucket.
        shards: Local tensors of every parameter in the bucket, by name.
        exchange: Transport.
        device: Where matrices travel and are orthogonalized.
        tuning: Measured choices of the autotuner; may be empty.
        stats: Counts the matrices that this rank orthogonalizes.
    """
    local = _LocalBucket(part.bucket, shards)
    gather, scatter = part.gather, part.scatter

    inputs = local.momentum(part.held, {leg.position for leg in (*gather.sends, *gather.kept)})
    sends = [inputs[leg.position] for leg in gather.sends]
    flight = exchange.launch(part.bucket, gather, sends, device)
    yield
    pieces = [*zip(gather.receives, flight.wait(), strict=True)]
    pieces += [(leg, inputs[leg.position]) for leg in gather.kept]
    stacks = local.assemble(pieces, device, tuning)
    # Scratch is bounded by the bucket: no buffer outlives its stage.
    del inputs, sends, pieces, flight
    results = local.orthogonalize(stacks, tuning)
    stats.ns_matrices += len(results)

    sends = [_cut(results[leg.position], leg.piece) for leg in scatter.sends]
    flight = exchange.launch(part.bucket, scatter, sends, device)
    local.apply((leg, _cut(results[leg.position], leg.piece)) for leg in scatter.kept)
    del results, sends
    yield
    local.apply(zip(scatter.receives, flight.wait(), strict=True))


@dataclass(frozen=True, slots=True)
class _LocalBucket:
    """A bucket with this rank's shards: every stage that is local."""

    bucket: Bucket
    shards: Mapping[str, LocalShard]

    def assignment(self, position: int) -> Assignment:
        return self.bucket.assignments[position]

    def shard(self, position: int) -> LocalShard:
        return self.shards[self.assignment(position).request.matrix.fqn]

    def momentum(self, held: Mapping[int, Piece], wanted: set[int]) -> dict[int, Tensor]:
        """Advance the momentum of all held pieces; return those wanted for orthogonalization."""
        inputs: dict[int, Tensor] = {}
        for group, positions in self._by_group(held):
            index = {i: held[i].index for i in positions}
            buffers = {i: self.shard(i).momentum[index[i]] for i in positions}
            grads = {i: self.shard(i).grad[index[i]].to(buffers[i].dtype) for i in positions}
            momentum_([*buffers.values()], [*grads.values()], group["momentum"])
            ready = {i: buffer for i, buffer in buffers.items() if i in wanted}
            if group["nesterov"]:
                ahead = nesterov([*ready.values()], [grads[i] for i in ready], group["momentum"])
                ready = dict(zip(ready, ahead, strict=True))
            inputs |= {i: tensor.reshape(held[i].shape) for i, tensor in ready.items()}
        return inputs

    def assemble(
        self, pieces: Iterable[tuple[Leg, Tensor]], device: torch.device, tuning: Timings
    ) -> list[tuple[list[int], Tensor]]:
        """Stack the matrices that this rank owns, equal shapes and methods together, wide."""
        by_position: dict[int, list[tuple[Piece, Tensor]]] = defaultdict(list)
        for leg, tensor in pieces:
            by_position[leg.position].append((leg.piece, tensor))
        methods: dict[str, list[int]] = defaultdict(list)
        for i in sorted(by_position):
            methods[self.assignment(i).request.method].append(i)
        wire_dtype = getattr(torch, self.bucket.wire_dtype)
        found = []
        for members in methods.values():
            requests = [self.assignment(i).request for i in members]
            shapes, steps = [r.matrix.shape for r in requests], requests[0].steps
            dtype = requests[0].ns_dtype
            for target, indices in batch_shapes(shapes, tuning, dtype=dtype, steps=steps):
                positions = [members[index] for index in indices]
                stack = torch.zeros((len(positions), *target), dtype=wire_dtype, device=device)
                _paste(self._views(stack, positions), by_position)
                found.append((positions, stack))
        return found

    def orthogonalize(
        self, stacks: list[tuple[list[int], Tensor]], tuning: Timings
    ) -> dict[int, Tensor]:
        """Orthogonalize the stacks, taking each from the list; the matrices, by position."""
        results: dict[int, Tensor] = {}
        while stacks:
            positions, stack = stacks.pop(0)
            group = self.shard(positions[0]).group
            request = self.assignment(positions[0]).request
            method = Method(
                resolve_coefficients(group["ns_coefficients"], group["ns_steps"]),
                group["eps"],
                getattr(torch, request.ns_dtype),
            )
            batch, rows, columns = stack.shape
            resolved = resolve_backend(method, tuning, batch, (rows, columns), stack.device)
            with exact_arithmetic(stack.device.type):
                stack = orthogonalize_stack(stack, method, *resolved)
            results |= self._views(stack, positions)
        return results

    def apply(self, updates: Iterable[tuple[Leg, Tensor]]) -> None:
        """Decay this rank's pieces and step along their updates."""
        by_position = {leg.position: (leg.piece, update) for leg, update in updates}
        for group, positions in self._by_group(by_position):
            params, steps, scales = [], [], []
            for i in positions:
                piece, update = by_position[i]
                param = self.shard(i).param[piece.index]
                params.append(param)
                steps.append(update.reshape(param.shape).to(param.device))
                shape = self.assignment(i).request.matrix.shape
                scales.append(lr_scale(group["adjust_lr_fn"], shape))
            apply_(params, steps, scales, lr=group["lr"], weight_decay=group["weight_decay"])

    def _by_group(self, positions: Iterable[int]) -> Iterator[tuple[Mapping[str, Any], list[int]]]:
        """Positions that share hyperparameters."""
        members: dict[int, list[int]] = defaultdict(list)
        for i in positions:
            members[id(self.shard(i).group)].append(i)
        for found in members.values():
            yield self.shard(found[0]).group, found

    def _views(self, stack: Tensor, positions: list[int]) -> dict[int, Tensor]:
        """Each matrix in its own orientation and size, as a view of a stack of wide ones."""
        return {
            i: view_like(self.assignment(i).request.matrix.shape, wide)
            for i, wide in zip(positions, stack.unbind(), strict=True)
        }


def view_like(shape: Sequence[int], wide: Tensor) -> Tensor:
    """View a matrix of `shape` in the padded wide matrix (M, N) that holds it, or its transpose."""
    small, large = sorted(shape)
    view = wide[:small, :large]
    return view.mT if shape[0] > shape[1] else view


def _spans(runs: Runs) -> Iterator[tuple[slice, slice]]:
    """For each run, where it lies in the piece and where in the matrix."""
    position = 0
    for start, stop in runs:
        yield slice(position, position + stop - start), slice(start, stop)
        position += stop - start


def _paste(
    matrices: Mapping[int, Tensor], by_position: Mapping[int, list[tuple[Piece, Tensor]]]
) -> None:
    targets, sources = [], []
    for i, matrix in matrices.items():
        for piece, tensor in by_position[i]:
            source = tensor.reshape(piece.shape)
            for piece_rows, rows in _spans(piece.rows):
                for piece_cols, cols in _spans(piece.cols):
                    targets.append(matrix[rows, cols])
                    sources.append(source[piece_rows, piece_cols])
    torch._foreach_copy_(targets, sources)


def _cut(matrix: Tensor, piece: Piece) -> Tensor:
    rows = [matrix[slice(*run)] for run in piece.rows]
    strip = rows[0] if len(rows) == 1 else torch.cat(rows)
    cols = [strip[:, slice(*run)] for run in piece.cols]
    return cols[0] if len(cols) == 1 else torch.cat(cols, dim=1)
