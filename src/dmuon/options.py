"""What a parameter group may contain: hyperparameters, routing facts, defaults and checks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from dmuon.algorithms.update import lr_scale
from dmuon.newton_schulz import Coefficients, resolve_coefficients
from dmuon.newton_schulz.method import check_precision
from dmuon.routing.rules import resolve_split

# torch.optim.AdamW's eps; the constructor's `eps` is Newton-Schulz's, as in torch.optim.Muon.
ADAMW_EPS = 1e-8

# Facts about a group's parameters, as `param_groups` writes them.
ROUTING_DEFAULTS: dict[str, Any] = {
    "use_muon": True,
    "rule": "",
    "flatten": False,
    "split": None,
}

# Written into groups by torch itself and by its schedulers.
_FOREIGN_KEYS = frozenset(
    {
        "params",
        "param_names",
        "name",
        "initial_lr",
        "max_lr",
        "min_lr",
        "max_momentum",
        "base_momentum",
        "swa_lr",
        "weight_decay_scale",
    }
)
_ALGORITHMS = {"muon": True, "adamw": False}


def normalize_group(
    group: dict[str, Any], defaults: Mapping[str, Any], number: int
) -> dict[str, Any]:
    """Return a copy of a user's group with `algorithm` resolved and per-algorithm defaults.

    Raises:
        ValueError: An unknown key, an unknown `algorithm`, or one that contradicts `use_muon`.
    """
    group = dict(group)
    where = f"parameter group {number}"
    if "algorithm" in group:
        algorithm = group.pop("algorithm")
        if algorithm not in _ALGORITHMS:
            raise ValueError(f"{where}: algorithm {algorithm!r} is unknown; use 'muon' or 'adamw'")
        use_muon = _ALGORITHMS[algorithm]
        if group.setdefault("use_muon", use_muon) != use_muon:
            raise ValueError(
                f"{where}: algorithm {algorithm!r} contradicts use_muon={group['use_muon']}; "
                "give one of them"
            )
    unknown = sorted(set(group) - set(defaults) - _FOREIGN_KEYS)
    if unknown:
        known = sorted({*defaults, "algorithm"})
        raise ValueError(
            f"{where}: unknown hyperparameters {', '.join(unknown)}; known are {', '.join(known)}"
        )
    if not group.get("use_muon", defaults["use_muon"]):
        group.setdefault("eps", ADAMW_EPS)
    return group


def check_hyperparameters(values: Mapping[str, Any], where: str) -> None:
    """Check the values of a group, or of the constructor's defaults.

    Raises:
        ValueError: A value is out of range; says which and where.
    """
    lr = values["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{where}: a Tensor lr must have one element, got {lr.numel()}")
    for key in ("lr", "weight_decay", "eps"):
        # A Tensor on an accelerator is not read: that would wait for the device.
        if not isinstance(values[key], Tensor) and not _in_range(values[key], math.inf):
            raise ValueError(f"{where}: {key} must be a number >= 0, got {values[key]!r}")
    if not _in_range(values["momentum"], 1):
        raise ValueError(f"{where}: momentum must be in [0, 1), got {values['momentum']!r}")
    betas = values["betas"]
    if not isinstance(betas, Sequence) or [_in_range(beta, 1) for beta in betas] != [True, True]:
        raise ValueError(f"{where}: betas must be two numbers in [0, 1), got {betas!r}")
    if not callable(values["adjust_lr_fn"]):  # a function is asked about real shapes only
        with _at(where):
            lr_scale(values["adjust_lr_fn"], (1, 1))
    _check_orthogonalization(values, where)


def _check_orthogonalization(values: Mapping[str, Any], where: str) -> None:
    dtype, steps = values["ns_dtype"], values["ns_steps"]
    coefficients = values["ns_coefficients"]
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{where}: ns_dtype must be a floating-point dtype, got {dtype!r}")
    if steps is not None and not isinstance(steps, int):
        raise ValueError(f"{where}: ns_steps must be an integer, got {steps!r}")
    if not isinstance(coefficients, (str, Sequence)):
        raise ValueError(
            f"{where}: ns_coefficients must be a name, one (a, b, c) or one per step, got "
            f"{coefficients!r}"
        )
    with _at(where):
        triples = resolve_coefficients(coefficients, steps)
    if dtype is not None:
        check_ns_dtype(dtype, triples, where)


def check_ns_dtype(dtype: torch.dtype, coefficients: Coefficients, where: str) -> None:
    """Check that a coefficient list can be iterated in a dtype.

    Raises:
        ValueError: It would diverge; says where.
    """
    with _at(f"{where}: ns_dtype {dtype}"):
        check_precision(coefficients, dtype)


@contextlib.contextmanager
def _at(where: str) -> Iterator[None]:
    """Say where a bad value was found."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _in_range(value: object, stop: float) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < stop


def param_names(group: Mapping[str, Any], number: int) -> list[str]:
    """Name of each parameter of a group: its own when it was given, else its position.

    Raises:
        ValueError: Parameters were replaced by a different number of them.
    """
    names = group.get("param_names")
    if names is not None:
        if len(names) != len(group["params"]):
            raise ValueError(
                f"parameter group {number} has {len(group['params'])} parameters but {len(names)} "
                "param_names; replace both together, or use add_param_group"
            )
        return list(names)
    return [f"param_groups[{number}]['params'][{i}]" for i in range(len(group["params"]))]


def check_names(names: Iterable[str]) -> None:
    """Check that every parameter has a name of its own: plans and errors know it by that.

    Raises:
        ValueError: Two parameters have the same name.
    """
    seen = set()
    for name in names:
        if name in seen:
            raise ValueError(
                f"{name}: two parameters have this name; make the names differ (for two models, "
                "put a prefix before each model's)"
            )
        seen.add(name)


def check_params(group: dict[str, Any], names: Iterable[str]) -> None:
    """Check that a Muon group holds matrices, and resolve its `split` to plain data.

    Modifies: `group["split"]`.

    Raises:
        ValueError: A parameter cannot be orthogonalized; names it and says what to do.
    """
    resolved = set()
    for name, param in zip(names, group["params"], strict=True):
        if not param.is_floating_point():
            raise ValueError(
                f"{name}: dtype {param.dtype} cannot be optimized; use a real floating-point dtype"
            )
        if not group["use_muon"]:
            continue
        if param.ndim < 2:
            raise ValueError(
                f"{name}: Muon needs a matrix, but this parameter has shape {tuple(param.shape)}. "
                "Route vectors to AdamW with dmuon.param_groups(model); if this is a flat "
                "parameter of FSDP1 (FullyShardedDataParallel) or ZeRO, shard the model with "
                "FSDP2 (torch.distributed.fsdp.fully_shard) instead, which keeps matrices"
            )
        resolved.add(resolve_split(name, param.shape, group["split"], group["flatten"]))
    if len(resolved) > 1:
        raise ValueError(
            f"{name}: split {group['split']!r} gives different blocks for parameters of different "
            "shape; put them in separate groups"
        )
    if resolved:
        group["split"] = resolved.pop()
