"""Optimizer state written by other Muon implementations, taken over by name.

[Note: momentum conventions] `B <- mu B + (1 - mu) G` (an exponential moving average: here and in
`torch.optim.Muon`) and `H <- mu H + G` (heavy ball) point in the same direction and differ in size,
`B = (1 - mu) H`. Orthogonalization hides the size only until the next gradient is added, so a
buffer of the other convention needs the factor `1 - mu`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from dmuon.algorithms import ALGORITHMS
from dmuon.optimizer import Muon
from dmuon.routing.evidence import clean_fqn
from dmuon.state.initial import MASTER

StateDict = Mapping[str, Any]

_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Adopted:
    """One value of state that was taken over.

    Attributes:
        fqn: The parameter.
        key: Its key here.
        source_key: Its key in the source.
        factor: What it was multiplied by.
        source_dtype: Its dtype in the source.
        dtype: Its dtype here.
    """

    fqn: str
    key: str
    source_key: str
    factor: float
    source_dtype: str
    dtype: str

    def __str__(self) -> str:
        key = self.key if self.key == self.source_key else f"{self.key} from {self.source_key}"
        factor = "" if self.factor == 1 else f", times {self.factor:.6g}"
        dtypes = " to ".join(dict.fromkeys((self.source_dtype, self.dtype)))
        return f"{self.fqn}: {key}{factor} ({dtypes})"


@dataclass(frozen=True, slots=True)
class Adoption:
    """What `adopt_state` did; as text, one line for each value.

    Attributes:
        adopted: What was taken over.
        fresh: Parameters that the source has no state for; they start afresh.
        unused: State of the source that has no place here.
        differences: Hyperparameters that are different in the source; they stay as they are here.
    """

    adopted: tuple[Adopted, ...]
    fresh: tuple[str, ...]
    unused: tuple[str, ...]
    differences: tuple[str, ...]

    def __str__(self) -> str:
        num_params = len({value.fqn for value in self.adopted})
        return "\n".join(
            [
                f"adopted the state of {num_params} parameters",
                *map(str, self.adopted),
                *(f"{fqn}: starts afresh" for fqn in self.fresh),
                *(f"{name}: not used" for name in self.unused),
                *(f"different: {text}" for text in self.differences),
            ]
        )


def adopt_state(
    optimizer: Muon,
    state_dicts: StateDict | Sequence[StateDict],
    *,
    source: Literal["torch", "keller", "dion"],
    momentum: Literal["ema", "heavy_ball"] | None = None,
    names: Sequence[Sequence[str]] | None = None,
    strict: bool = True,
) -> Adoption:
    """Load the state that another Muon implementation saved.

    Momentum and AdamW's moments are found by parameter name, brought to the convention, dtype and
    layout that they have here, and loaded. Hyperparameters are left alone; the report names those
    that differ.

    Args:
        optimizer: Made with names, as by `dmuon.param_groups`. Its parameters may be sharded.
        state_dicts: What `state_dict()` of the source's optimizers returned, or
            `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`. Several are
            joined: a Muon and an AdamW, or those of all ranks where each had a part. Tensors are
            whole, and the same on every rank.
        source: Who wrote them: "torch" (`torch.optim.Muon`, `AdamW`); "keller"
            (github.com/KellerJordan/Muon: `Muon`, `MuonWithAuxAdam`, and their single-device
            forms); "dion" (github.com/microsoft/dion: `Muon`).
        momentum: Convention of its momentum; None is what its current release writes: "heavy_ball"
            for "dion", "ema" for the others. "keller" before February 2025 wrote "heavy_ball".
        names: For each state dict, the FQNs of its parameters in the order of its groups; needed
            where it has none (the source's optimizer was made without named parameters).
        strict: Raise if a parameter has no state in the source, or if the source has state that
            has no place here.

    Returns:
        What was mapped.

    Raises:
        ValueError: Names, shapes or algorithms do not fit; names the parameters. The optimizer is
            then unchanged.
    """
    if source not in _SOURCES:
        raise ValueError(f"source {source!r} is unknown; use one of {', '.join(_SOURCES)}")
    if isinstance(state_dicts, Mapping):
        state_dicts = [state_dicts]
    if momentum not in (None, "ema", "heavy_ball"):
        raise ValueError(f"momentum {momentum!r} is unknown; use 'ema' or 'heavy_ball'")
    convention = _SOURCES[source]
    heavy_ball = (momentum or convention.momentum) == "heavy_ball"
    mine = optimizer.state_dict()
    targets = _targets(optimizer, mine)
    problems: list[str] = []
    entries = _entries(state_dicts, names, {target.fqn for target in targets}, problems)
    adopted = _adopt(targets, entries, convention, heavy_ball, problems)
    report = _report([*chain(*adopted.values())], targets, entries, convention)
    if strict:
        problems += [f"{fqn}: the source has no state for it" for fqn in report.fresh]
        problems += [f"{name}: has no place here" for name in report.unused]
    if problems:
        raise ValueError(_join(problems))
    _load(optimizer, mine, adopted, entries)
    return report


@dataclass(frozen=True, slots=True)
class _Entry:
    """State of one parameter in the source, with the group that it came in."""

    state: Mapping[str, Any]
    group: Mapping[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """Its state, with a step that is counted per group, as microsoft/dion does."""
        return {key: self.group[key] for key in ("step",) if key in self.group} | dict(self.state)


@dataclass(frozen=True, slots=True)
class _Target:
    """A parameter of the optimizer, its number in the state dict, its state and its group."""

    fqn: str
    number: int
    state: Mapping[str, Tensor]
    group: Mapping[str, Any]

    @property
    def algorithm(self) -> str:
        return "muon" if self.group["use_muon"] else "adamw"

    @property
    def keys(self) -> list[str]:
        """What the source must have: Muon's or AdamW's state. What a variant adds starts afresh."""
        return list(ALGORITHMS[self.algorithm].state)


def _no_renaming(group: Mapping[str, Any]) -> Mapping[str, Any]:
    return group


def _dion_hyperparameters(group: Mapping[str, Any]) -> Mapping[str, Any]:
    renamed = {"mu": "momentum", "epsilon": "eps", "adjust_lr": "adjust_lr_fn"}
    scales = {"spectral_norm": "spectral_unclamped", "rms_norm": "match_rms_adamw"}
    found = {renamed.get(key, key): value for key, value in group.items()}
    if "beta1" in found:
        found["betas"] = found["beta1"], found["beta2"]
    if "adjust_lr_fn" in found:
        found["adjust_lr_fn"] = scales.get(found["adjust_lr_fn"], "a factor of 1")
    return found


@dataclass(frozen=True, slots=True)
class _Convention:
    """How one implementation names its state and its hyperparameters.

    Attributes:
        momentum: The convention of its momentum.
        keys: Its possible keys for each of ours that it calls otherwise.
        hyperparameters: Reads one of its groups under our names.
    """

    momentum: str
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    hyperparameters: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _no_renaming

    def adopt(self, target: _Target, entry: _Entry, heavy_ball: bool) -> list[Adopted]:
        """Say which of the source's values becomes which of a parameter's.

        Raises:
            ValueError: The source optimized it otherwise, or it has another shape there.
        """
        values = entry.values
        algorithm = entry.group.get("algorithm", target.algorithm)
        found = {
            key: next((name for name in self.keys.get(key, (key,)) if name in values), None)
            for key in target.keys
        }
        if algorithm != target.algorithm or None in found.values():
            raise ValueError(
                f"{target.fqn}: goes to {target.algorithm} here and needs "
                f"{', '.join(target.keys)}; the source has {', '.join(entry.state)}"
                + (f", of {algorithm}" if algorithm != target.algorithm else "")
            )
        factor = self._factor(target, entry) if heavy_ball else 1.0
        adopted = []
        for key, name in found.items():
            value, like = values[str(name)], target.state[key]
            _check_shape(f"{target.fqn}: {name}", value, like)
            adopted.append(Adopted(target.fqn, key, str(name), factor, _dtype(value), _dtype(like)))
        return adopted

    def _factor(self, target: _Target, entry: _Entry) -> float:
        # See [Note: momentum conventions].
        if not target.group["use_muon"]:
            return 1.0
        momentum = self.hyperparameters(entry.group).get("momentum")
        if momentum is None:
            raise ValueError(
                f"{target.fqn}: its group in the source has no momentum coefficient, which gives "
                "the factor of its buffer; put it into the group"
            )
        return 1.0 - float(momentum)


_SOURCES = {
    "torch": _Convention("ema"),
    # Adam's moments had other names before May 2025.
    "keller": _Convention(
        "ema", {"exp_avg": ("exp_avg", "moment1"), "exp_avg_sq": ("exp_avg_sq", "moment2")}
    ),
    "dion": _Convention(
        "heavy_ball",
        {"momentum_buffer": ("momentum",), "exp_avg": ("momentum",), "exp_avg_sq": ("variance",)},
        _dion_hyperparameters,
    ),
}
_COMPARED = {
    "muon": ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn"),
    "adamw": ("lr", "weight_decay", "betas", "eps"),
}


def _targets(optimizer: Muon, state_dict: StateDict) -> list[_Target]:
    """The parameters that have state, in order."""
    targets = []
    for i, (group, packed) in enumerate(
        zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ):
        if "param_names" not in group:
            raise ValueError(
                f"parameter group {i} has no names to find state by; make the optimizer with "
                "dmuon.param_groups(model), or with named parameters"
            )
        for fqn, number in zip(group["param_names"], packed["params"], strict=True):
            if number in state_dict["state"]:
                targets.append(_Target(fqn, number, state_dict["state"][number], packed))
    return targets


def _entries(
    state_dicts: Sequence[StateDict],
    names: Sequence[Sequence[str]] | None,
    known: set[str],
    problems: list[str],
) -> dict[str, _Entry]:
    """What the state dicts hold, by the optimizer's own names where it has such a parameter."""
    if names is not None and len(names) != len(state_dicts):
        raise ValueError(f"names has {len(names)} lists for {len(state_dicts)} state dicts")
    entries: dict[str, _Entry] = {}
    for i, state_dict in enumerate(state_dicts):
        for name, key, group in _named(state_dict, i, None if names is None else names[i]):
            state = state_dict["state"].get(key)
            if state:
                fqn = clean_fqn(name)
                fqn = fqn if fqn in known else fqn.removeprefix("module.")
                first = entries.setdefault(fqn, _Entry(state, group))
                if not _equal(first.state, state):
                    problems.append(f"{fqn}: two state dicts hold different state for it")
    return entries


def _adopt(
    targets: Sequence[_Target],
    entries: Mapping[str, _Entry],
    convention: _Convention,
    heavy_ball: bool,
    problems: list[str],
) -> dict[int, list[Adopted]]:
    """What becomes of the state that was found, by the parameter's number."""
    adopted: dict[int, list[Adopted]] = {}
    for target in targets:
        if target.fqn in entries:
            try:
                adopted[target.number] = convention.adopt(target, entries[target.fqn], heavy_ball)
            except ValueError as error:
                problems.append(str(error))
    return adopted


def _named(
    state_dict: StateDict, number: int, names: Sequence[str] | None
) -> Iterator[tuple[str, int | str, Mapping[str, Any]]]:
    """Name, key and group of every parameter of a state dict."""
    groups = state_dict["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    names = _own_names(groups, keys) if names is None else names
    if names is None:
        raise ValueError(
            f"state dict {number} has no names; give names=, for each state dict the FQNs of "
            "its parameters in the order of its groups"
        )
    if len(names) != len(keys):
        raise ValueError(f"state dict {number} has {len(keys)} parameters, but {len(names)} names")
    owners = [group for group in groups for _ in group["params"]]
    return zip(names, keys, owners, strict=True)


def _own_names(
    groups: Sequence[Mapping[str, Any]], keys: Sequence[int | str]
) -> Sequence[str] | None:
    """The names that a state dict itself gives its parameters, if it does."""
    names = [key for key in keys if isinstance(key, str)]
    if len(names) == len(keys):
        return names
    if all("param_names" in group for group in groups):
        return [name for group in groups for name in group["param_names"]]
    return None


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one is other:
        return True
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(other[key]))
        for key, value in one.items()
    )


def _dtype(value: Any) -> str:  # noqa: ANN401 - a number or a tensor
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else "number"


def _check_shape(name: str, value: Any, like: Tensor) -> None:  # noqa: ANN401
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if shape != tuple(like.shape):
        raise ValueError(
            f"{name} has shape {shape} in the source, but {tuple(like.shape)} is needed; give the "
            "names in the order of the source's groups (KellerJordan's MuonWithAuxAdam sorts the "
            "matrices of a group by size, largest first)"
        )


def _report(
    adopted: Sequence[Adopted],
    targets: Sequence[_Target],
    entries: Mapping[str, _Entry],
    convention: _Convention,
) -> Adoption:
    used = {(value.fqn, value.source_key) for value in adopted}
    # What does not fit at all is a problem of its own.
    misfits = {target.fqn for target in targets} - {value.fqn for value in adopted}
    return Adoption(
        adopted=tuple(adopted),
        fresh=tuple(target.fqn for target in targets if target.fqn not in entries),
        unused=tuple(
            f"{fqn}: {key}"
            for fqn, entry in entries.items()
            for key in entry.state
            if fqn not in misfits and (fqn, key) not in used
        ),
        differences=_differences(targets, entries, convention),
    )


def _differences(
    targets: Sequence[_Target], entries: Mapping[str, _Entry], convention: _Convention
) -> tuple[str, ...]:
    counts: Counter[str] = Counter()
    for target in targets:
        entry = entries.get(target.fqn)
        theirs = convention.hyperparameters(entry.group) if entry else {}
        for key in _COMPARED[target.algorithm]:
            pair = [_plain(target.group[key]), _plain(theirs.get(key, target.group[key]))]
            if pair[0] != pair[1]:
                counts[f"{target.algorithm} {key} {pair[0]} here, {pair[1]} in the source"] += 1
    return tuple(f"{text} ({num} parameters)" for text, num in counts.items())


def _plain(value: Any) -> Any:  # noqa: ANN401 - a hyperparameter
    """A hyperparameter in one of its equal forms."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, list):
        return tuple(value)
    return "original" if value is None else value


def _load(
    optimizer: Muon,
    state_dict: StateDict,
    adopted: Mapping[int, Sequence[Adopted]],
    entries: Mapping[str, _Entry],
) -> None:
    """Load what was found, each value by the parameter's number, and apply the factors."""
    state = {
        number: {
            **{key: value for key, value in state_dict["state"][number].items() if key != MASTER},
            **{value.key: entries[value.fqn].values[value.source_key] for value in values},
        }
        for number, values in adopted.items()
    }
    optimizer.load_state_dict({**state_dict, "state": state})
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, values in adopted.items():
        loaded = optimizer.state[params[number]]
        for value in values:
            # Not in place: what needed no conversion is still the source's own tensor.
            loaded[value.key] = loaded[value.key] * value.factor


def _join(problems: Sequence[str]) -> str:
    lines = [f"  {problem}" for problem in problems[:_MAX_LISTED]]
    if len(problems) > _MAX_LISTED:
        lines.append(f"  and {len(problems) - _MAX_LISTED} more")
    return "\n".join(
        [
            "the state cannot be adopted as it is:",
            *lines,
            "strict=False starts parameters without state afresh and leaves out what has no place",
        ]
    )
