"""What ranks must agree on, how they compare it, and how they say where they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from dmuon.plan.plan import Domain, Plan

# Per matrix or parameter, what ranks must agree on: what it is, and what was planned for it.
Description = dict[str, tuple[str, str]]

_MISSING = "nothing of this name", ""


def describe(plan: Plan, domain: Domain) -> Description:
    """The matrices of a domain, as compared across its ranks."""
    lines = {}
    for number, bucket in enumerate(b for b in plan.buckets if b.domain == domain):
        for a in bucket.assignments:
            r = a.request
            owners = ", ".join(map(str, a.owners))
            finish = f", {r.finish}" * bool(r.finish)
            lines[str(r.matrix)] = (
                f"shape {r.target.shape}, {r.target} on ranks {r.target.ranks}, state "
                f"{r.source}, {r.wire_dtype}, {r.method}{finish}",
                f"owner {owners}, bucket {number}",
            )
    return lines


def digest(description: Description) -> bytes:
    """SHA-256 of a description."""
    text = "\n".join(f"{key}: {', '.join(lines)}" for key, lines in description.items())
    return hashlib.sha256(text.encode()).digest()


def first_difference(descriptions: Mapping[int, Description]) -> str:
    """Name the first entry about which ranks disagree, and what each found."""
    keys = dict.fromkeys(key for description in descriptions.values() for key in description)
    # One parameter that differs moves the owners of others: what ranks found comes first.
    for part in (0, 1):
        for key in sorted(keys):
            found = {rank: d.get(key, _MISSING)[part] for rank, d in descriptions.items()}
            if len(set(found.values())) > 1:
                text = "\n".join(f"  rank {rank}: {line}" for rank, line in found.items())
                return (
                    f"{key}: ranks disagree about this parameter, so they cannot exchange it:\n"
                    f"{text}\nBuild the same model, the same parameter groups and the same "
                    "sharding on every rank of the mesh"
                )
    raise AssertionError("fingerprints differ but descriptions do not")
