"""Which parameter goes to Muon, which to AdamW, and why: rules on evidence, and overrides."""

import difflib
import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from dmuon.routing.evidence import CONVS, Facts, Use, clean_fqn, read_model
from dmuon.routing.roles import role
from dmuon.routing.split import Blocks, Split, block_shape, resolve_split

__all__ = ["Split", "param_groups", "resolve_split"]

Rule: TypeAlias = str | Callable[[str, torch.Tensor], bool]

_GROUP_KEYS = {"params", "param_names", "name", "use_muon", "rule", "flatten", "split"}
_NO_DECAY = ("norm", "bias", "vector", "table")
RULES = frozenset(
    {
        *("embedding", "head", "input", "depthwise conv", "doubtful", *_NO_DECAY),
        *("conv", "fused qkv", "rnn gates", "stack", "matrix"),
    }
)


class Decision(NamedTuple):
    """Where a parameter goes and how it splits; parameters with equal decisions share a group."""

    use_muon: bool
    rule: str
    flatten: bool = False
    split: Blocks | None = None

    def facts(self) -> dict[str, Any]:
        """What a group says of it; how it splits is nothing to AdamW."""
        return self._asdict() if self.use_muon else {"use_muon": False, "rule": self.rule}


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


def param_groups(  # noqa: PLR0913 - everything that a user may say about routing
    model: nn.Module | Iterable[tuple[str, nn.Parameter]],
    *,
    muon: Iterable[Rule] = (),
    adamw: Iterable[Rule] = (),
    input: Literal["adamw", "muon"] = "adamw",
    split: Mapping[str, Split | Sequence[int]] = {},
    options: Mapping[str, Mapping[str, Any]] = {},
    no_decay: bool = False,
    strict: bool = False,
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
        input: Where layers that take the data go: stems, patch embeddings, first convolutions.
        options: Further keys of groups, such as `lr`, by rule ("norm") or else by FQN segments
            ("*.c_attn", as in `muon`). Names win over rules, and what comes later over what
            comes earlier.
        no_decay: Whether norms, biases, vectors and tables of tokens or positions get
            `weight_decay=0.0`. Embeddings and heads keep theirs; see `options`.
        strict: Whether parameters that nothing tells about raise, in place of going to AdamW
            under the rule "doubtful".
        muon_options: Further keys of every Muon group, such as `lr`.
        adamw_options: Further keys of every AdamW group.

    Returns:
        One group for each distinct (use_muon, rule, flatten, split, options), Muon groups first,
        none empty, each with a `name` of its own. Each trainable parameter is in exactly one, as
        an (FQN, parameter) pair; frozen parameters are in none.

    Raises:
        TypeError: `model` is neither a module nor (name, parameter) pairs, or a rule is neither
            a string nor callable.
        ValueError: A rule, split or option matches nothing or does not fit what it matches, an
            option is a key that routing sets, the model is FSDP1, or `strict` finds a doubtful
            parameter.
    """
    by_key = {rule: {"weight_decay": 0.0} for rule in (_NO_DECAY if no_decay else ())}
    by_key |= {key: {**by_key.get(key, {}), **values} for key, values in options.items()}
    _check_arguments(input, [muon_options, adamw_options, *by_key.values()])
    params = _params(model, find_input=input == "adamw")
    decisions = {param.fqn: param.default for param in params}
    decisions |= _overrides(params, muon, adamw)
    decisions |= _divided(params, decisions, split)
    if strict:
        _refuse_doubtful(decisions)
    return _groups(params, decisions, (adamw_options, muon_options), by_key)


def _groups(
    params: list[_Param],
    decisions: Mapping[str, Decision],
    by_side: Sequence[Mapping[str, Any]],
    by_key: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    keys = _option_keys(params, decisions, by_key)
    grouped: dict[tuple[Decision, tuple[str, ...]], list[tuple[str, nn.Parameter]]] = {}
    for param in params:
        member = (param.fqn, param.parameter)
        grouped.setdefault((decisions[param.fqn], keys[param.fqn]), []).append(member)
    groups: dict[str, dict[str, Any]] = {}
    for decision, reached in sorted(grouped, key=lambda group: not group[0].use_muon):
        name = _group_name(decision, reached, groups)
        group = {"params": grouped[decision, reached], "name": name, **decision.facts()}
        for options in (by_side[decision.use_muon], *map(by_key.__getitem__, reached)):
            group |= options
        groups[name] = group
    return list(groups.values())


def _check_arguments(input_side: str, options: Iterable[Mapping[str, Any]]) -> None:
    if input_side not in ("adamw", "muon"):
        raise ValueError(f"input must be 'adamw' or 'muon', got {input_side!r}")
    if taken := sorted(_GROUP_KEYS & set().union(*options)):
        raise ValueError(f"options {taken} are set by routing; use muon=, adamw= and split=")


def _refuse_doubtful(decisions: Mapping[str, Decision]) -> None:
    doubtful = [fqn for fqn, decision in decisions.items() if decision.rule == "doubtful"]
    if doubtful:
        more = f" and {len(doubtful) - 5} more" if len(doubtful) > 5 else ""
        raise ValueError(
            f"{', '.join(doubtful[:5])}{more}: nothing tells whether these are matrices that map"
            " features; name them in muon= or adamw="
        )


def _option_keys(
    params: list[_Param], decisions: Mapping[str, Decision], options: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """The keys of `options` that reach each parameter, in the order in which they apply."""
    keys: dict[str, tuple[str, ...]] = {}
    by_rule = [key for key in options if key in RULES]
    for fqn, decision in decisions.items():
        keys[fqn] = tuple(key for key in by_rule if key == decision.rule)
    for key in options:
        for param in _matched(key, params) if key not in RULES else ():
            keys[param.fqn] += (key,)
    return keys


def _group_name(decision: Decision, keys: Sequence[str], taken: Container[str]) -> str:
    """A short name for logs: the rule, the names that options were given by, and a number."""
    names = [key for key in keys if key not in RULES]
    name = " ".join([decision.rule.removeprefix("override: "), *names])
    numbered = (name if number == 1 else f"{name} {number}" for number in itertools.count(1))
    return next(found for found in numbered if found not in taken)


def _params(
    model: nn.Module | Iterable[tuple[str, nn.Parameter]], *, find_input: bool
) -> list[_Param]:
    params, facts = read_model(model)
    return [
        _Param(tuple(use.fqn for use in uses), uses[0].parameter, _default(uses, facts, find_input))
        for uses in params
    ]


def _default(uses: list[Use], facts: Facts, find_input: bool) -> Decision:
    """The decision for the first use, unless another use is as an embedding or a head."""
    rank = {"embedding": 0, "head": 1}
    found = [_decision(use, facts, find_input) for use in uses]
    return min(found, key=lambda decision: rank.get(decision.rule, 2))


def _decision(use: Use, facts: Facts, find_input: bool) -> Decision:
    """AdamW for a reason, or Muon; either way split as an override to Muon would split it."""
    muon, shape = _muon_decision(use), use.parameter.shape
    reason = role(use, facts, find_input=find_input)
    if reason in (None, "input") and muon.rule == "depthwise conv":
        reason = muon.rule
    elif reason in (None, "input") and min(block_shape(shape, muon.split, muon.flatten)) < 2:
        reason = "vector"
    return muon._replace(use_muon=False, rule=reason) if reason else muon


def _muon_decision(use: Use) -> Decision:
    """How a parameter is seen as matrices, by the type of the module that holds it."""
    shape, flatten = tuple(use.parameter.shape), False
    rule, num = _fused(use)
    if isinstance(use.module, CONVS) and len(shape) > 2:
        rule, flatten, num = "conv", True, use.module.groups
        if num > 1 and shape[0] % num == 0 and (shape[1] == 1 or shape[0] == num):
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
