"""What a parameter group may contain: hyperparameters, routing facts, defaults and checks."""

from __future__ import annotations

import contextlib
import difflib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.algorithms import ALGORITHMS, lr_scale
from dmuon.layout.matrices import matrices_of
from dmuon.newton_schulz import resolve_coefficients
from dmuon.newton_schulz.method import check_precision
from dmuon.plan.cost import Timings
from dmuon.routing.rules import resolve_split

MIB = 2**20
_NONFINITE = ("propagate", "skip", "raise")

# torch.optim.AdamW's eps; the constructor's `eps` is Newton-Schulz's, as in torch.optim.Muon.
ADAMW_EPS = 1e-8

# Facts about a group's parameters, as `param_groups` writes them.
ROUTING_DEFAULTS: dict[str, Any] = {
    "use_muon": True,
    "rule": "",
    "flatten": False,
    "split": None,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a `Muon` was made with, besides its groups.

    Attributes:
        process_group: Ranks over which plain tensors are replicated.
        shard_state: Keep the momentum of those sharded.
        master_weights: Keep float32 copies of half-precision weights.
        repeat_ns: Orthogonalize once per replica.
        bucket_bytes: Bound on what one owner receives in one exchange.
        nonfinite: "propagate", "skip" or "raise".
        nonfinite_group: Ranks that decide that together; None is all.
        tuning: Measured times; or "auto" or "measure", until there are any.

    Raises:
        ValueError: One of them is out of range, or contradicts another.
    """

    process_group: dist.ProcessGroup | None = None
    shard_state: bool = False
    master_weights: bool = False
    repeat_ns: bool = False
    bucket_bytes: float = 64 * MIB
    nonfinite: str = "propagate"
    nonfinite_group: dist.ProcessGroup | None = None
    tuning: Timings | str = "auto"

    def __post_init__(self) -> None:
        if self.shard_state and self.process_group is None:
            raise ValueError("shard_state=True needs the process_group of the replicated tensors")
        if not (_in_range(self.bucket_bytes, math.inf) and self.bucket_bytes):
            raise ValueError(f"bucket_cap_mb must be > 0 and finite, got {self.bucket_bytes / MIB}")
        if self.nonfinite not in _NONFINITE:
            raise ValueError(f"nonfinite must be one of {_NONFINITE}, got {self.nonfinite!r}")


_NUMBERS = frozenset({"weight_decay", "eps", "momentum"})

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


def normalize_group(
    group: dict[str, Any], defaults: Mapping[str, Any], number: int
) -> dict[str, Any]:
    """Return a copy of a user's group with plain values, its algorithm and that one's defaults.

    A key that is not known stays, as in any torch optimizer: wrappers and schedulers keep their
    own there.

    Raises:
        ValueError: An unknown `algorithm`, or one that contradicts `use_muon`.

    Warns:
        UserWarning: An unknown key is nearly that of a hyperparameter.
    """
    group = plain_values(group)
    where = f"parameter group {number}"
    group.setdefault("algorithm", _default_algorithm(group, defaults))
    algorithm = ALGORITHMS.get(group["algorithm"])
    if algorithm is None:
        raise ValueError(
            f"{where}: algorithm {group['algorithm']!r} is unknown; use one of "
            f"{', '.join(ALGORITHMS)}"
        )
    use_muon = algorithm.matrices is not None
    if group.setdefault("use_muon", use_muon) != use_muon:
        raise ValueError(
            f"{where}: algorithm {algorithm.name!r} contradicts use_muon={group['use_muon']}; "
            "give one of them"
        )
    for key, value in algorithm.options.items():
        group.setdefault(key, value)
    if not use_muon:
        group.setdefault("eps", ADAMW_EPS)
    _warn_of_near_misses(group, {*defaults, *algorithm.options}, where)
    return group


def _default_algorithm(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    name: str = defaults["algorithm"]
    if "use_muon" not in group:
        return name
    if not group["use_muon"]:
        return "adamw"
    return name if ALGORITHMS[name].matrices else "muon"


def _warn_of_near_misses(group: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in sorted(group.keys() - known - _FOREIGN_KEYS):
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if close:
            warnings.warn(
                f"{where}: {key!r} is no hyperparameter and changes nothing; "
                f"is {close[0]!r} meant?",
                UserWarning,
                stacklevel=4,
            )


def plain(value: Any) -> Any:  # noqa: ANN401 - any hyperparameter
    """A hyperparameter as Python's own numbers, strings and lists, which any checkpoint can hold.

    NumPy's scalars and the lists and dicts of configuration libraries become plain ones; tensors,
    dtypes, functions and what else a group may hold are returned as they are.
    """
    if value is None or isinstance(value, (bool, Tensor)):
        return value
    if hasattr(value, "tolist"):  # NumPy's, whose bool is none of Python's numbers
        value = value.tolist()
    if isinstance(value, str):
        value = str.__str__(value)
    elif isinstance(value, Real):
        value = int(value) if isinstance(value, Integral) else float(value)
    elif type(value) in (list, tuple):
        value = type(value)(plain(item) for item in value)
    elif isinstance(value, Mapping):
        value = {key: plain(item) for key, item in value.items()}
    elif isinstance(value, Sequence) and not isinstance(value, (list, tuple, bytes)):
        value = [plain(item) for item in value]
    return value


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters as plain values; of tensors, only `lr` stays one and is read at each step."""
    return {
        key: value.item()
        if isinstance(value, Tensor) and value.numel() == 1 and key in _NUMBERS
        else value
        if key == "params"
        else plain(value)
        for key, value in values.items()
    }


def check_hyperparameters(values: Mapping[str, Any], where: str) -> None:
    """Check the values of a group, or of the constructor's defaults.

    Raises:
        ValueError: A value is out of range; says which and where.
    """
    check_numbers(values, where)
    if not isinstance(values["nesterov"], int):
        raise ValueError(f"{where}: nesterov must be True or False, got {values['nesterov']!r}")
    if not callable(values["adjust_lr_fn"]):  # a function is asked about real shapes only
        with at(where):
            lr_scale(values["adjust_lr_fn"], (1, 1))
    _check_orthogonalization(values, where)


def check_numbers(values: Mapping[str, Any], where: str) -> None:
    """Check what a step reads anew each time.

    Raises:
        ValueError: A value is out of range; says which and where.
    """
    lr = values["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{where}: a Tensor lr must have one element, got {lr.numel()}")
    for key in ("lr", "weight_decay", "eps"):
        # A learning rate on an accelerator is not read: that would wait for the device.
        is_read = key != "lr" or not isinstance(lr, Tensor)
        if is_read and not _in_range(values[key], math.inf):
            raise ValueError(f"{where}: {key} must be a number >= 0, got {values[key]!r}")
    algorithm = ALGORITHMS[values["algorithm"]]
    for key in ("momentum", *algorithm.options):
        bound = algorithm.bounds.get(key, 1)
        if key in values and not _in_range(values[key], bound):
            raise ValueError(f"{where}: {key} must be in [0, {bound}), got {values[key]!r}")
    betas = values["betas"]
    if not isinstance(betas, Sequence) or [_in_range(beta, 1) for beta in betas] != [True, True]:
        raise ValueError(f"{where}: betas must be two numbers in [0, 1), got {betas!r}")


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
    with at(where):
        triples = resolve_coefficients(coefficients, steps)
    if dtype is not None:
        with at(f"{where}: ns_dtype {dtype}"):
            check_precision(triples, dtype)


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    """Say where a bad value was found."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _in_range(value: object, stop: float) -> bool:
    # Asking about `Real` takes longer, and this is asked at every step.
    return (type(value) is float or isinstance(value, Real)) and 0 <= float(value) < stop


def param_names(group: Mapping[str, Any], number: int) -> list[str]:
    """Name of each parameter of a group: its own when it was given, else its position.

    Where parameters were replaced by a different number of them, `check_group` says so.
    """
    names = group.get("param_names")
    if names is not None and len(names) == len(group["params"]):
        return list(names)
    return [f"param_groups[{number}]['params'][{i}]" for i in range(len(group["params"]))]


def check_group(group: dict[str, Any], number: int) -> None:
    """Check the values of a group and that its parameters suit it.

    Modifies: the group, whose values become plain data, also those written into it later.

    Raises:
        ValueError: Something does not fit; names the group or the parameter.
    """
    group.update(plain_values(group))
    where = f"parameter group {number}"
    names, num_params = group.get("param_names"), len(group["params"])
    if names is not None and len(names) != num_params:
        raise ValueError(
            f"{where} has {num_params} parameters but {len(names)} param_names; replace both "
            "together, or use add_param_group"
        )
    algorithm = ALGORITHMS.get(group["algorithm"])
    if algorithm is None or group["use_muon"] != (algorithm.matrices is not None):
        raise ValueError(
            f"{where}: algorithm {group['algorithm']!r} and use_muon={group['use_muon']} do not go "
            "together; to change the algorithm of parameters, remove them and add a new group"
        )
    check_hyperparameters(group, where)
    check_params(group, param_names(group, number))


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


def scales_of(group: Mapping[str, Any], shape: Sequence[int]) -> dict[tuple[int, int], float]:
    """Learning-rate scale of each shape of matrix that a parameter holds."""
    split = resolve_split("", shape, group["split"], group["flatten"])
    matrices = matrices_of("", shape, flatten=group["flatten"], split=split)
    shapes = dict.fromkeys(matrix.shape for matrix in matrices if matrix.numel)
    return {shape: lr_scale(group["adjust_lr_fn"], shape) for shape in shapes}


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
        if ALGORITHMS[group["algorithm"]].matrices is None:
            continue
        if param.ndim < 2:
            raise ValueError(
                f"{name}: Muon needs a matrix, but this parameter has shape {tuple(param.shape)}. "
                "Route vectors to AdamW with dmuon.param_groups(model); if this is a flat "
                "parameter of FSDP1 (FullyShardedDataParallel) or ZeRO, shard the model with "
                "FSDP2 (torch.distributed.fsdp.fully_shard) instead, which keeps matrices"
            )
        resolved.add(resolve_split(name, param.shape, group["split"], group["flatten"]))
        with at(name):
            scales_of(group, param.shape)
    if len(resolved) > 1:
        raise ValueError(
            f"{name}: split {group['split']!r} gives different blocks for parameters of different "
            "shape; put them in separate groups"
        )
    if resolved:
        group["split"] = resolved.pop()
