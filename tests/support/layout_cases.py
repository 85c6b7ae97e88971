"""The layouts that the property test runs and that the table in docs/layouts.md lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.parity import Outcome, Spec, run_parity


@dataclass(frozen=True)
class LayoutCase:
    """A named layout: parameters on a number of ranks."""

    name: str
    world_size: int
    specs: Sequence[Spec]
    muon: Mapping[str, Any] = field(default_factory=dict)


def run_case(case: LayoutCase) -> Outcome:
    """Rank body: train the case's parameters, laid out and whole."""
    return run_parity(case.specs, muon=case.muon)


R = Replicate()
S = Shard
# What `fully_shard` makes of a parameter that tensor parallelism has cut along the same dim.
SS = _StridedShard

CONV = {"flatten": True}


def on(mesh: tuple[int, ...], *placements: Placement, **options: Any) -> Any:
    """Return a function from shapes to specs of one layout."""

    def specs(*shapes: tuple[int, ...]) -> list[Spec]:
        return [Spec(shape, mesh, placements, options=options) for shape in shapes]

    return specs


SQUARES = ((16, 16), (8, 16), (16, 8))
UNEVEN = ((18, 32), (9, 8), (5, 7), (3, 9), (1, 8))
EXPERTS = ((8, 6, 4), (5, 4, 6))

CASES = [
    LayoutCase("FSDP2", 2, on((2,), S(0))(*SQUARES)),
    LayoutCase("FSDP2, 4 ranks", 4, on((4,), S(0))(*SQUARES)),
    LayoutCase("FSDP2, 3 ranks", 3, on((3,), S(0))(*SQUARES, *UNEVEN)),
    LayoutCase("FSDP2, uneven and empty shards", 4, on((4,), S(0))(*UNEVEN)),
    LayoutCase("FSDP2, Shard(1)", 4, on((4,), S(1))(*SQUARES, (8, 9), (6, 1))),
    LayoutCase(
        "FSDP2, Shard(0) and Shard(1) mixed", 4, on((4,), S(0))(*SQUARES) + on((4,), S(1))(*SQUARES)
    ),
    LayoutCase(
        "FSDP2, bf16 and fp32",
        2,
        [
            *[Spec((8, 8), (2,), (S(0),), dtype=torch.bfloat16)] * 3,
            *[Spec((6, 6), (2,), (S(0),))] * 2,
        ],
    ),
    LayoutCase("FSDP2, 8 ranks, one matrix", 8, on((8,), S(0))((12, 8))),
    LayoutCase("HSDP 2x2", 4, on((2, 2), R, S(0))((6, 4), *UNEVEN)),
    LayoutCase("HSDP 2x4", 8, on((2, 4), R, S(0))(*SQUARES, (7, 5))),
    LayoutCase("HSDP 4x2", 8, on((4, 2), R, S(0))(*SQUARES, (7, 5))),
    LayoutCase("HSDP, Shard(1)", 4, on((2, 2), R, S(1))(*SQUARES, (5, 7))),
    LayoutCase("HSDP, experts", 4, on((2, 2), R, S(0))(*EXPERTS)),
    LayoutCase("DDP", 2, [Spec(s) for s in SQUARES], {"process_group": "world"}),
    LayoutCase("DDP, 4 ranks", 4, [Spec(s) for s in UNEVEN], {"process_group": "world"}),
    LayoutCase(
        "DDP, sharded state",
        4,
        [Spec(s) for s in (*UNEVEN, *EXPERTS)],
        {"process_group": "world", "shard_state": True},
    ),
    LayoutCase("TP, column-parallel", 2, on((2,), S(0))((8, 8), (10, 6), (7, 6))),
    LayoutCase("TP, row-parallel", 2, on((2,), S(1))((8, 8), (10, 6), (6, 7))),
    LayoutCase("TP, replicated", 2, on((2,), R)((8, 8), (10, 6))),
    LayoutCase("DP x TP", 4, on((2, 2), R, S(0))((8, 8)) + on((2, 2), R, S(1))((10, 6), (6, 7))),
    LayoutCase(
        "FSDP x TP, column-parallel",
        4,
        on((2, 2), SS(0, split_factor=2), S(0))((10, 6), (8, 8), (7, 5), (3, 4)),
    ),
    LayoutCase("FSDP x TP, row-parallel", 4, on((2, 2), S(0), S(1))((10, 6), (8, 8), (7, 5))),
    LayoutCase("FSDP x TP, replicated", 4, on((2, 2), S(0), R)((10, 6), (7, 5))),
    LayoutCase("FSDP x TP, Shard(1)", 4, on((2, 2), S(1), S(0))((10, 6), (7, 5))),
    LayoutCase(
        "HSDP x TP, column-parallel",
        8,
        on((2, 2, 2), R, SS(0, split_factor=2), S(0))((10, 6), (8, 8), (5, 4)),
    ),
    LayoutCase("HSDP x TP, row-parallel", 8, on((2, 2, 2), R, S(0), S(1))((10, 6), (7, 5))),
    LayoutCase("HSDP x TP, replicated", 8, on((2, 2, 2), R, S(0), R)((10, 6), (7, 5))),
    LayoutCase("nested shards of one dim", 4, on((2, 2), S(0), S(0))((10, 6), (7, 5), (3, 4))),
    LayoutCase("EP, whole experts", 4, on((4,), S(0))((8, 6, 4), (4, 4, 6))),
    LayoutCase("EP, uneven experts", 4, on((4,), S(0))((5, 6, 4), (2, 4, 6))),
    LayoutCase("experts, Shard(1)", 4, on((4,), S(1))(*EXPERTS)),
    LayoutCase("experts, Shard(2)", 4, on((4,), S(2))(*EXPERTS)),
    LayoutCase("EP x FSDP, Shard(0) twice", 4, on((2, 2), SS(0, split_factor=2), S(0))(*EXPERTS)),
    LayoutCase("EP x FSDP, Shard(1)", 4, on((2, 2), S(1), S(0))(*EXPERTS)),
    LayoutCase("EP x FSDP, Shard(2)", 4, on((2, 2), S(2), S(0))(*EXPERTS)),
    LayoutCase(
        "stacked layers of experts",
        4,
        on((4,), S(1))((2, 3, 4, 5)) + on((2, 2), S(0), S(1))((3, 4, 6, 5)),
    ),
    LayoutCase("convolutions", 4, on((4,), S(0), **CONV)((8, 3, 3, 3), (4, 6, 3), (3, 2, 5))),
    LayoutCase(
        "convolutions, inner dims",
        4,
        on((4,), S(1), **CONV)((4, 6, 3)) + on((2, 2), S(0), S(2), **CONV)((8, 3, 5, 2)),
    ),
    LayoutCase(
        "fused QKV, borders inside shards",
        4,
        # R47.
        on((4,), S(0), split=(8, 2, 2))((12, 16)) + on((4,), S(0), split=(6, 2, 2))((10, 6)),
    ),
    LayoutCase(
        "heads on rows and columns",
        4,
        on((4,), S(1), split=(3, 3, 3))((9, 8))
        + on((4,), S(0), split=((2, 2, 2, 2), 1))((8, 8))
        + on((4,), S(1), split=((3, 3, 3), 1))((5, 9)),
    ),
    LayoutCase(
        "fused QKV, FSDP x TP",
        4,
        on((2, 2), SS(0, split_factor=2), S(0), split=(8, 2, 2))((12, 16)),
    ),
    LayoutCase(
        "gate and up of experts, EP x FSDP",
        4,
        on((2, 2), S(1), S(0), split=(3, 3))((4, 6, 4)),
    ),
    LayoutCase(
        "several meshes over the same ranks",
        4,
        on((4,), S(0))(*SQUARES) + on((2, 2), R, S(0))(*UNEVEN) + on((2, 2), S(1), S(0))(*EXPERTS),
    ),
    LayoutCase(
        "several meshes over other ranks",
        4,
        on((2, 2), S(0), S(1))(*SQUARES) + on((2,), S(0))((6, 5), (8, 8)) + on((1,), S(0))((5, 5)),
    ),
]
