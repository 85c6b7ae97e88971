"""Which parameter goes to Muon, which to AdamW, how it splits into matrices, and why.

Decisions read module types, ties, names and *global logical* shapes only, so they are the same for
a plain model, a meta model, every DTensor layout, and a pipeline stage that holds part of a model.
"""

import difflib
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

Rule: TypeAlias = str | Callable[[str, torch.Tensor], bool]
_Blocks: TypeAlias = tuple[tuple[int, ...], int]

_CONVS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
_NORM_CLASS = re.compile(r"Norm(\dd)?$")
_EMBEDDING_CLASS = re.compile(r"Embedding(s|Bag)?$")
_EMBEDDING_WORDS = {"emb", "embed", "embeds", "embedding", "embeddings"}
_POSITION_WORDS = {"wpe", "pos", "position", "positions", "positional", "type", "segment"}
_TRANSPARENT = {"module", "model", "base_model"}
_HEADS_ANYWHERE = {"lm_head", "embed_out"}
_HEADS_ON_TOP = {"output", "classifier", "score", "fc", "unembed", "unembedding", "to_logits"}
_GROUP_KEYS = {"params", "param_names", "use_muon", "rule", "flatten", "split"}


class Split(NamedTuple):
    """Blocks of a fused matrix; each block is orthogonalized as a matrix of its own.

    Attributes:
        sizes: Block sizes along `dim`, in order; they sum to that dimension.
        dim: 0 cuts rows (out features), 1 cuts columns (in features) of the matrix.
        num: A number of equal blocks, in place of `sizes`; see `Split.equal`.
    """

    sizes: tuple[int, ...] = ()
    dim: int = 0
    num: int | None = None

    @classmethod
    def equal(cls, num: int, dim: int = 0) -> "Split":
        """Return a split into `num` equal blocks; `num` must divide the dimension it meets."""
        return cls(dim=dim, num=num)


class _Route(NamedTuple):
    """Where a parameter goes; parameters with equal routes share a group."""

    use_muon: bool
    rule: str
    flatten: bool = False
    split: _Blocks | None = None


@dataclass(frozen=True, eq=False)
class _Use:
    """One place where a parameter is held; a tied parameter has several."""

    fqn: str
    name: str
    module: nn.Module | None
    parameter: nn.Parameter


@dataclass(frozen=True, eq=False)
class _Param:
    """A trainable parameter, every name that reaches it (the first is its FQN), its default."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    default: _Route

    @property
    def fqn(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)


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
    routes = {param.fqn: param.default for param in params}
    routes |= _overrides(params, muon, adamw)
    routes |= _splits(params, routes, split)
    grouped: dict[_Route, list[tuple[str, nn.Parameter]]] = {}
    for param in params:
        grouped.setdefault(routes[param.fqn], []).append((param.fqn, param.parameter))
    return [
        {"params": members, **route._asdict(), **muon_options}
        if route.use_muon
        else {"params": members, "use_muon": False, "rule": route.rule, **adamw_options}
        for route, members in sorted(grouped.items(), key=lambda item: not item[0].use_muon)
    ]


def resolve_split(
    fqn: str, shape: Sequence[int], split: Split | Sequence[Any] | None, flatten: bool
) -> _Blocks | None:
    """Return `split` as plain `(sizes, dim)`, checked against a parameter's global shape.

    Args:
        fqn: The parameter's name, for errors.
        shape: Its global logical shape. The matrix is the last two dims, or with `flatten` the
            first dim x all others.
        split: A `Split`, row sizes, a resolved `(sizes, dim)`, or None.
        flatten: Whether the matrix is a flattened convolution.

    Returns:
        `(sizes, dim)`, or None when the matrix stays whole.

    Raises:
        ValueError: `split` is none of these, or its blocks do not fill the dimension.
    """
    if split is None:
        return None
    sizes, dim, num = _read_split(fqn, split)
    found = f"{fqn}: cannot split shape {tuple(shape)}"
    if len(shape) < 2:
        raise ValueError(f"{found}, it holds no matrix; remove its split")
    if dim not in (0, 1):
        raise ValueError(f"{found} along dim {dim}; use 0 (rows) or 1 (columns of the matrix)")
    if flatten and dim == 1:
        raise ValueError(f"{found} by columns, which mix channels and positions; use dim=0")
    extent = _matrix_shape(shape, flatten)[dim]
    if num is not None:
        if num < 1 or extent % num:
            raise ValueError(f"{found} into {num} equal blocks; use a divisor of {extent}")
        sizes = (extent // num,) * num
    if not sizes or min(sizes) < 1 or sum(sizes) != extent:
        raise ValueError(f"{found} into {sizes}; use positive sizes that sum to {extent}")
    return (sizes, dim) if len(sizes) > 1 else None


def _read_split(fqn: str, split: Split | Sequence[Any]) -> tuple[tuple[int, ...], int, int | None]:
    try:
        if isinstance(split, Split):
            num = None if split.num is None else index(split.num)
            return tuple(map(index, split.sizes)), index(split.dim), num
        if len(split) == 2 and isinstance(split[0], Sequence):
            return tuple(map(index, split[0])), index(split[1]), None
        return tuple(map(index, split)), 0, None
    except TypeError:
        raise ValueError(f"{fqn}: split {split!r} is neither a Split nor row sizes") from None


def _matrix_shape(shape: Sequence[int], flatten: bool) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if flatten else (shape[-2], shape[-1])


def _block_shape(shape: Sequence[int], route: _Route) -> tuple[int, int]:
    """Shape of each matrix of a parameter by its default route: whole, or equal row blocks."""
    rows, columns = _matrix_shape(shape, route.flatten)
    return (route.split[0][0] if route.split else rows), columns


def _params(model: nn.Module | Iterable[tuple[str, nn.Parameter]]) -> list[_Param]:
    if isinstance(model, nn.Module):
        model = _unwrap(model)
        uses, evidence = list(_module_uses(model)), _evidence(model)
    else:
        uses, evidence = _named_uses(model), _Evidence()
    by_parameter: dict[int, list[_Use]] = {}
    for use in uses:
        if {"_flat_param", "_fsdp_wrapped_module"} & set(use.fqn.split(".")):
            raise ValueError(f"{use.fqn} has lost its shape to FSDP1; use FSDP2's `fully_shard`")
        if is_lazy(use.parameter):
            raise ValueError(f"{use.fqn} has no shape yet; run its lazy module once first")
        if use.parameter.requires_grad:
            by_parameter.setdefault(id(use.parameter), []).append(use)
    return [
        _Param(tuple(use.fqn for use in ties), ties[0].parameter, _tied_route(ties, evidence))
        for ties in by_parameter.values()
    ]


def _unwrap(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        else:
            return model


def _module_uses(model: nn.Module) -> Iterator[_Use]:
    """Yield every use of every parameter, by the module whose type says what it is for."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        segments = path.split(".") if path else []
        if "FullyShardedDataParallel" in _class_names(module):
            raise ValueError(f"module {path!r} is FSDP1, not supported; use FSDP2's `fully_shard`")
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holder, name = module, key
            if isinstance(module, ParametrizationList) and len(segments) > 1:
                holder, name = modules[".".join(segments[:-2])], segments[-1]
            elif isinstance(module, (nn.ParameterDict, nn.ParameterList)) and segments:
                holder, name = modules[".".join(segments[:-1])], f"{segments[-1]}_{key}"
            yield _Use(_clean([*segments, key]), name, holder, parameter)


def _named_uses(named: object) -> list[_Use]:
    # Materialised once: a second pass over `model.named_parameters()` would find nothing.
    pairs = list(named) if isinstance(named, Iterable) else [named]
    uses = []
    for pair in pairs:
        match pair:
            case (str(fqn), nn.Parameter() as parameter):
                uses.append(_Use(_clean(fqn.split(".")), fqn.split(".")[-1], None, parameter))
            case _:
                raise TypeError(
                    "param_groups needs the model, or (name, parameter) pairs as from"
                    f" `named_parameters()`; found a {type(pair).__name__}; pass the model"
                )
    warnings.warn(
        "parameters without their modules: embeddings and heads are recognised by name only, and"
        " 3 or more dims are taken as a stack of matrices, even in a convolution. Pass the model.",
        UserWarning,
        stacklevel=4,
    )
    return uses


def _clean(segments: Iterable[str]) -> str:
    return ".".join(segment for segment in segments if segment not in _WRAPPERS)


def _class_names(module: nn.Module | None) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__]


def _words(name: str) -> set[str]:
    return set(name.lower().split("_"))


@dataclass(frozen=True)
class _Evidence:
    """What a model as a whole says about its output heads."""

    head_ids: frozenset[int] = frozenset()
    embedding_shapes: frozenset[tuple[int, ...]] = frozenset()


def _evidence(model: nn.Module) -> _Evidence:
    heads: set[int] = set()
    shapes: set[tuple[int, ...]] = set()
    for path, module in model.named_modules():
        heads.update(map(id, _declared_head(module)))
        if isinstance(module, nn.Embedding) and not _words(path.split(".")[-1]) & _POSITION_WORDS:
            shapes.add(tuple(module.weight.shape))
    return _Evidence(frozenset(heads), frozenset(shapes))


def _declared_head(module: nn.Module) -> Iterable[nn.Parameter]:
    """Parameters of the head that a Hugging Face model declares."""
    try:
        head = module.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # another model, or a stage without its head
        return ()
    return head.parameters() if isinstance(head, nn.Module) else ()


def _tied_route(ties: list[_Use], evidence: _Evidence) -> _Route:
    """The route of the first use, unless another use is as an embedding or a head."""
    rank = {"embedding": 0, "head": 1}
    return min((_route(use, evidence) for use in ties), key=lambda route: rank.get(route.rule, 2))


def _route(use: _Use, evidence: _Evidence) -> _Route:
    """AdamW for a reason, or Muon; either way with the layout that an override to Muon uses."""
    layout = _layout(use)
    reason = _adamw_reason(use, layout, evidence)
    return layout._replace(use_muon=False, rule=reason) if reason else layout


def _adamw_reason(use: _Use, layout: _Route, evidence: _Evidence) -> str | None:
    shape, classes = use.parameter.shape, _class_names(use.module)
    checks = {
        "embedding": _is_embedding(use, classes),
        "head": len(shape) == 2 and _is_head(use, evidence),
        "norm": any(map(_NORM_CLASS.search, classes)),
        "bias": "bias" in _words(use.name),
        "depthwise conv": layout.rule == "depthwise conv",
        "vector": len(shape) < 2 or min(_block_shape(shape, layout)) < 2,
    }
    return next((reason for reason, holds in checks.items() if holds), None)


def _is_embedding(use: _Use, classes: list[str]) -> bool:
    if use.module is not None:
        by_type = any(map(_EMBEDDING_CLASS.search, classes))
        return by_type or bool(_words(use.name) & _EMBEDDING_WORDS)
    words = set().union(*map(_words, use.fqn.split(".")[-2:]))
    return bool(words & {*_EMBEDDING_WORDS, "wte", "wpe"})


def _is_head(use: _Use, evidence: _Evidence) -> bool:
    segments = use.fqn.split(".")
    top = next(itertools.dropwhile(_TRANSPARENT.__contains__, segments), "")
    by_name = top in _HEADS_ON_TOP or top.split("_")[-1] in ("head", "heads")
    if by_name or _HEADS_ANYWHERE & set(segments) or id(use.parameter) in evidence.head_ids:
        return True
    # In a numbered block the shape proves nothing: with 256 byte tokens of width 64, a head and
    # the first weight of every MLP are both 256 x 64.
    in_block = any(segment.isdecimal() for segment in segments[:-2])
    return not in_block and tuple(use.parameter.shape) in evidence.embedding_shapes


def _layout(use: _Use) -> _Route:
    """How a parameter is seen as matrices, by the type of the module that holds it."""
    module, shape = use.module, tuple(use.parameter.shape)
    rule, flatten, num = "stack" if len(shape) > 2 else "matrix", False, 1
    if isinstance(module, _CONVS) and len(shape) > 2:
        rule, flatten, num = "conv", True, module.groups
        if num > 1 and (shape[1] == 1 or shape[0] == num):
            rule = "depthwise conv"
    elif isinstance(module, nn.MultiheadAttention) and use.name == "in_proj_weight":
        rule, num = "fused qkv", 3
    elif use.name.startswith(("weight_ih", "weight_hh")):
        if isinstance(module, (nn.LSTM, nn.LSTMCell)):
            rule, num = "rnn gates", 4
        elif isinstance(module, (nn.GRU, nn.GRUCell)):
            rule, num = "rnn gates", 3
    fits = len(shape) > 1 and shape[0] % num == 0  # a parametrization may store another shape
    blocks = resolve_split(use.fqn, shape, Split.equal(num), flatten) if fits and num > 1 else None
    return _Route(True, rule, flatten, blocks)


def _overrides(
    params: list[_Param], muon: Iterable[Rule], adamw: Iterable[Rule]
) -> dict[str, _Route]:
    forced: dict[str, _Route] = {}
    for use_muon, rules in ((True, muon), (False, adamw)):
        for rule in [rules] if isinstance(rules, str) or callable(rules) else rules:
            label = f"override: {'muon' if use_muon else 'adamw'} ({_rule_name(rule)})"
            matched = _matched(rule, params)
            for param in _forcible(rule, matched) if use_muon else matched:
                route = param.default._replace(use_muon=use_muon, rule=label)
                first = forced.setdefault(param.fqn, route)
                if first.use_muon != use_muon:
                    raise ValueError(f"{param.fqn}: {first.rule} and {label}; drop one of them")
    return forced


def _forcible(rule: Rule, matched: list[_Param]) -> list[_Param]:
    """The matched parameters that hold matrices; a string rule may also reach their biases."""
    able = [
        param
        for param in matched
        if len(param.shape) > 1 and math.prod(_block_shape(param.shape, param.default)) > 1
    ]
    unable = next((param for param in matched if param not in able), None)
    if unable is None or (able and isinstance(rule, str)):
        return able
    raise ValueError(
        f"{unable.fqn}: shape {unable.shape} holds no matrix, so Muon cannot take it;"
        f" narrow the muon rule {_rule_name(rule)!r}"
    )


def _splits(
    params: list[_Param],
    routes: Mapping[str, _Route],
    split: Mapping[str, Split | Sequence[int]],
) -> dict[str, _Route]:
    keys: dict[str, str] = {}
    divided: dict[str, _Route] = {}
    for key, blocks in split.items():
        matched = _matched(key, params)
        # A key that names a fused module also reaches its bias, which has nothing to split.
        fused = [p for p in matched if len(p.shape) > 1 and p.default.rule != "bias"]
        for param in fused or matched:
            fqn, route = param.fqn, routes[param.fqn]
            if not route.use_muon:
                raise ValueError(
                    f"{fqn}: split key {key!r} reaches it, but its shape {param.shape} goes to"
                    f" AdamW ({route.rule}); narrow the key, or send it to Muon with muon="
                )
            if keys.setdefault(fqn, key) != key:
                raise ValueError(f"{fqn}: split by both {keys[fqn]!r} and {key!r}; drop one")
            parts = resolve_split(fqn, param.shape, blocks, route.flatten)
            divided[fqn] = route._replace(split=parts)
    return divided


def _matched(rule: Rule, params: list[_Param]) -> list[_Param]:
    """The parameters that a rule reaches by any of their names; at least one."""
    if isinstance(rule, str):
        pattern = _clean(rule.split(".")).split(".")
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
