"""Which parameter goes to Muon, which to AdamW, and why."""

from dmuon.routing.rules import Split, param_groups, resolve_split

__all__ = ["Split", "param_groups", "resolve_split"]
