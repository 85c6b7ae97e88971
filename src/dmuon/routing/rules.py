"""Which parameter goes to Muon, which to AdamW, and why: rules on evidence, and overrides."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from dmuon.routing.evidence import Heads, Use, clean_fqn, read_model, role
from dmuon.routing.split import Blocks, Split, block_shape, resolve_split

__all__ = ["Split", "param_groups", "resolve_split"]

Rule: TypeAlias = str | Callable[[str, torch.Tensor], bool]

_CONVS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_GROUP_KEYS = {"params", "param_names", "use_muon", "rule", "flatten", "split"}


class Decision(NamedTuple):
    """Where a parameter goes and how it splits; parameters with equal decisions share a group."""

    use_muon: bool
    rule: str
    flatten: bool = False
    split: Blocks | None = None


@dataclass(frozen=True, eq=False)
class _Param:
    """A trainable parameter, every name that reaches it (the first is its FQN), its default."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    default: Decision

    @property
    def fqn(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def block_shape(self) -> tuple[int, int]:
        return block_shape(self.shape, self.default.split, self.default.flatten)


def param_groups(
    model: nn.Module | Iterable[tuple[str, nn.Parameter]],
    *,
    muon: Iterable[Rule] = (),
    adamw: Iterable[Rule] = (),
    split: Mapping[str, Split | Sequence[int]] = {},
    muon_options: Mapping[str, Any] = {},
    adamw_options: Mapping[str, Any] = {},
) -> list[dict[str, Any]]:
    """Return torch param groups that send hidden matrices to Muon and all else to AdamW.

    Args:
        model: The model, before or after `fully_shard`, DDP, `torch.compile` or activation
            checkpointing. Named parameters work too, but then embeddings and heads are
            recognised by name only.
        muon: Rules that force Muon. A string matches consecutive whole segments of the FQN, `*`
            any one segment; a callable is asked with (FQN, parameter). Vectors that a string
            reaches beside matrices, such as a bias, stay where they are.
        adamw: Rules that force AdamW.
        split: Blocks of fused weights by FQN segments: a `Split`, or row sizes.
        muon_options: Further keys of every Muon group, such as `lr`.
        adamw_options: Further keys of every AdamW group.

    Returns:
        One group for each distinct (use_muon, rule, flatten, split), Muon groups first, none
        empty. Each trainable parameter is in exactly one, as an (FQN, parameter) pair; frozen
        parameters are in none.

    Raises:
        TypeError: `model` is neither a module nor (name, parameter) pairs, or a rule is neither
            a string nor callable.
        ValueError: A rule or split matches nothing or does not fit what it matches, an option
            is a key that routing sets, or the model is FSDP1.
    """
    if taken := sorted(_GROUP_KEYS & (muon_options.keys() | adamw_options.keys())):
        raise ValueError(f"options {taken} are set by routing; use muon=, adamw= and split=")
    params = _params(model)
    decisions = {param.fqn: param.default for param in params}
    decisions |= _overrides(params, muon, adamw)
    decisions |= _divided(params, decisions, split)
    grouped: dict[Decision, list[tuple[str, nn.Parameter]]] = {}
    for param in params:
        grouped.setdefault(decisions[param.fqn], []).append((param.fqn, param.parameter))
    return [
        {"params": members, **decision._asdict(), **muon_options}
        if decision.use_muon
        else {"params": members, "use_muon": False, "rule": decision.rule, **adamw_options}
        for decision, members in sorted(grouped.items(), key=lambda item: not item[0].use_muon)
    ]


def _params(model: nn.Module | Iterable[tuple[str, nn.Parameter]]) -> list[_Param]:
    params, heads = read_model(model)
    return [
        _Param(tuple(use.fqn for use in uses), uses[0].parameter, _default(uses, heads))
        for uses in params
    ]


def _default(uses: list[Use], heads: Heads) -> Decision:
    """The decision for the first use, unless another use is as an embedding or a head."""
    rank = {"embedding": 0, "head": 1}
    return min((_decision(use, heads) for use in uses), key=lambda found: rank.get(found.rule, 2))


def _decision(use: Use, heads: Heads) -> Decision:
    """AdamW for a reason, or Muon; either way split as an override to Muon would split it."""
    muon, shape = _muon_decision(use), use.parameter.shape
    reason = role(use, heads)
    if reason is None and muon.rule == "depthwise conv":
        reason = muon.rule
    if reason is None and (len(shape) < 2 or min(block_shape(shape, muon.split, muon.flatten)) < 2):
        reason = "vector"
    return muon._replace(use_muon=False, rule=reason) if reason else muon


def _muon_decision(use: Use) -> Decision:
    """How a parameter is seen as matrices, by the type of the module that holds it."""
    shape, flatten = tuple(use.parameter.shape), False
    rule, num = _fused(use)
    if isinstance(use.module, _CONVS) and len(shape) > 2:
        rule, flatten, num = "conv", True, use.module.groups
        if num > 1 and (shape[1] == 1 or shape[0] == num):
            rule = "depthwise conv"
    fits = len(shape) > 1 and shape[0] % num == 0  # a parametrization may store another shape
    blocks = resolve_split(use.fqn, shape, Split.equal(num), flatten) if fits and num > 1 else None
    return Decision(True, rule, flatten, blocks)


def _fused(use: Use) -> tuple[str, int]:
    """The rule of a weight that is no convolution, and its number of equal blocks of rows."""
    if isinstance(use.module, nn.MultiheadAttention) and use.name == "in_proj_weight":
        return "fused qkv", 3
    if use.name.startswith(("weight_ih", "weight_hh")):
        if isinstance(use.module, (nn.LSTM, nn.LSTMCell)):
            return "rnn gates", 4
        if isinstance(use.module, (nn.GRU, nn.GRUCell)):
            return "rnn gates", 3
    return ("stack" if use.parameter.ndim > 2 else "matrix"), 1


def _overrides(
    params: list[_Param], muon: Iterable[Rule], adamw: Iterable[Rule]
) -> dict[str, Decision]:
    forced: dict[str, Decision] = {}
    for use_muon, rules in ((True, muon), (False, adamw)):
        for rule in [rules] if isinstance(rules, str) or callable(rules) else rules:
            label = f"override: {'muon' if use_muon else 'adamw'} ({_rule_name(rule)})"
            matched = _matched(rule, params)
            for param in _forcible(rule, matched) if use_muon else matched:
                decision = param.default._replace(use_muon=use_muon, rule=label)
                first = forced.setdefault(param.fqn, decision)
                if first.use_muon != use_muon:
                    raise ValueError(f"{param.fqn}: {first.rule} and {label}; drop one of them")
    return forced


def _forcible(rule: Rule, matched: list[_Param]) -> list[_Param]:
    """The matched parameters that hold matrices; a string rule may also reach their biases."""
    able = [param for param in matched if len(param.shape) > 1 and math.prod(param.block_shape) > 1]
    unable = next((param for param in matched if param not in able), None)
    if unable is None or (able and isinstance(rule, str)):
        return able
    raise ValueError(
        f"{unable.fqn}: shape {unable.shape} holds no matrix, so Muon cannot take it;"
        f" narrow the muon rule {_rule_name(rule)!r}"
    )


def _divided(
    params: list[_Param],
    decisions: Mapping[str, Decision],
    split: Mapping[str, Split | Sequence[int]],
) -> dict[str, Decision]:
    keys: dict[str, str] = {}
    divided: dict[str, Decision] = {}
    for key, blocks in split.items():
        matched = _matched(key, params)
        # A key that names a fused module also reaches its bias, which has nothing to split.
        fused = [p for p in matched if len(p.shape) > 1 and p.default.rule != "bias"]
        for param in fused or matched:
            fqn, decision = param.fqn, decisions[param.fqn]
            if not decision.use_muon:
                raise ValueError(
                    f"{fqn}: split key {key!r} reaches it, but its shape {param.shape} goes to"
                    f" AdamW ({decision.rule}); narrow the key, or send it to Muon with muon="
                )
            if keys.setdefault(fqn, key) != key:
                raise ValueError(f"{fqn}: split by both {keys[fqn]!r} and {key!r}; drop one")
            parts = resolve_split(fqn, param.shape, blocks, decision.flatten)
            divided[fqn] = decision._replace(split=parts)
    return divided


def _matched(rule: Rule, params: list[_Param]) -> list[_Param]:
    """The parameters that a rule reaches by any of their names; at least one."""
    if isinstance(rule, str):
        pattern = clean_fqn(rule).split(".")
        matched = [p for p in params if any(_has_segments(name, pattern) for name in p.names)]
    elif callable(rule):
        matched = [p for p in params if any(rule(name, p.parameter) for name in p.names)]
    else:
        raise TypeError(f"rule {rule!r} is neither FQN segments nor (fqn, parameter) -> bool")
    if not matched:
        raise ValueError(
            f"rule {_rule_name(rule)!r} matches no trainable parameter; {_hint(rule, params)}"
        )
    return matched


def _has_segments(fqn: str, pattern: Sequence[str]) -> bool:
    return any(
        all(wanted in ("*", found) for wanted, found in zip(pattern, window, strict=True))
        for window in _windows(fqn, len(pattern))
    )


def _windows(fqn: str, length: int) -> list[list[str]]:
    segments = fqn.split(".")
    return [segments[start : start + length] for start in range(len(segments) - length + 1)]


def _hint(rule: Rule, params: list[_Param]) -> str:
    """The FQNs with segments most like a rule that matched nothing, or the first ones."""
    fqns: dict[str, str] = {}
    for param in params if isinstance(rule, str) else ():
        for window in _windows(param.fqn, _rule_name(rule).count(".") + 1):
            fqns.setdefault(".".join(window), param.fqn)
    close = [fqns[text] for text in difflib.get_close_matches(_rule_name(rule), fqns, cutoff=0.5)]
    if close:
        return f"close: {', '.join(dict.fromkeys(close))}"
    return f"parameters are: {', '.join(param.fqn for param in params[:3])}, ..."


def _rule_name(rule: Rule) -> str:
    return rule if isinstance(rule, str) else getattr(rule, "__name__", type(rule).__name__)
