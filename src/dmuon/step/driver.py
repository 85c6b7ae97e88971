"""The driver that overlaps buckets."""

from __future__ import annotations

from collections.abc import Iterable

from dmuon.step.bucket import Life

_DONE = object()


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
