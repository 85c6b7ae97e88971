"""What a model says about its parameters: names, ties, module types and global logical shapes.

It is the same for a plain model, a meta model, every DTensor layout, and a pipeline stage that
holds part of a model.
"""

import itertools
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

# Segments that wrappers put into names.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
_NORM_CLASS = re.compile(r"Norm(\dd)?$")
_EMBEDDING_CLASS = re.compile(r"Embedding(s|Bag)?$")
_EMBEDDING_WORDS = {"emb", "embed", "embeds", "embedding", "embeddings"}
_POSITION_WORDS = {"wpe", "pos", "position", "positions", "positional", "type", "segment"}
_TRANSPARENT = {"module", "model", "base_model"}
_HEADS_ANYWHERE = {"lm_head", "embed_out"}
_HEADS_ON_TOP = {"output", "classifier", "score", "fc", "unembed", "unembedding", "to_logits"}


@dataclass(frozen=True, eq=False)
class Use:
    """One place where a parameter is held; a tied parameter has several."""

    fqn: str
    name: str
    module: nn.Module | None
    parameter: nn.Parameter


@dataclass(frozen=True)
class Heads:
    """What a model as a whole says about its output heads."""

    head_ids: frozenset[int] = frozenset()
    embedding_shapes: frozenset[tuple[int, ...]] = frozenset()


def clean_fqn(name: str) -> str:
    """Return a name, or segments of one, without what wrappers put into it."""
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)


def read_model(
    model: nn.Module | Iterable[tuple[str, nn.Parameter]],
) -> tuple[list[list[Use]], Heads]:
    """Return the uses of each trainable parameter together, and what is known of output heads."""
    if isinstance(model, nn.Module):
        model = _unwrap(model)
        uses, heads = list(_module_uses(model)), _heads(model)
    else:
        uses, heads = _named_uses(model), Heads()
    by_parameter: dict[int, list[Use]] = {}
    for use in uses:
        if {"_flat_param", "_fsdp_wrapped_module"} & set(use.fqn.split(".")):
            raise ValueError(f"{use.fqn} has lost its shape to FSDP1; use FSDP2's `fully_shard`")
        if is_lazy(use.parameter):
            raise ValueError(f"{use.fqn} has no shape yet; run its lazy module once first")
        if use.parameter.requires_grad:
            by_parameter.setdefault(id(use.parameter), []).append(use)
    return list(by_parameter.values()), heads


def _named_uses(named: object) -> list[Use]:
    # Materialised once: a second pass over `model.named_parameters()` would find nothing.
    pairs = list(named) if isinstance(named, Iterable) else [named]
    uses = []
    for pair in pairs:
        match pair:
            case (str(fqn), nn.Parameter() as parameter):
                uses.append(Use(clean_fqn(fqn), fqn.split(".")[-1], None, parameter))
            case _:
                raise TypeError(
                    "param_groups needs the model, or (name, parameter) pairs as from"
                    f" `named_parameters()`; found a {type(pair).__name__}; pass the model"
                )
    warnings.warn(
        "parameters without their modules: embeddings and heads are recognised by name only, and"
        " 3 or more dims are taken as a stack of matrices, even in a convolution. Pass the model.",
        UserWarning,
        stacklevel=5,
    )
    return uses


def _unwrap(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        else:
            return model


def _module_uses(model: nn.Module) -> Iterator[Use]:
    """Yield every use of every parameter, by the module whose type says what it is for."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        segments = path.split(".") if path else []
        if "FullyShardedDataParallel" in _class_names(module):
            raise ValueError(f"module {path!r} is FSDP1, not supported; use FSDP2's `fully_shard`")
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holder, name = module, key
            # These hold the parameters of the module above them.
            if isinstance(module, ParametrizationList) and len(segments) > 1:
                holder, name = modules[".".join(segments[:-2])], segments[-1]
            elif isinstance(module, (nn.ParameterDict, nn.ParameterList)) and segments:
                holder, name = modules[".".join(segments[:-1])], f"{segments[-1]}_{key}"
            yield Use(clean_fqn(".".join([*segments, key])), name, holder, parameter)


def _heads(model: nn.Module) -> Heads:
    heads: set[int] = set()
    shapes: set[tuple[int, ...]] = set()
    for path, module in model.named_modules():
        heads.update(map(id, _declared_head(module)))
        if isinstance(module, nn.Embedding) and not _words(path.split(".")[-1]) & _POSITION_WORDS:
            shapes.add(tuple(module.weight.shape))
    return Heads(frozenset(heads), frozenset(shapes))


def _declared_head(module: nn.Module) -> Iterable[nn.Parameter]:
    """Parameters of the head that a Hugging Face model declares."""
    try:
        head = module.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # another model, or a stage without its head
        return ()
    return head.parameters() if isinstance(head, nn.Module) else ()


def _class_names(module: nn.Module | None) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__]


def _words(name: str) -> set[str]:
    return set(name.lower().split("_"))


def role(use: Use, heads: Heads) -> str | None:
    """Return what a parameter is to its model where that is no hidden weight, else None."""
    classes = _class_names(use.module)
    checks = {
        "embedding": _is_embedding(use, classes),
        "head": len(use.parameter.shape) == 2 and _is_head(use, heads),
        "norm": any(map(_NORM_CLASS.search, classes)),
        "bias": "bias" in _words(use.name),
    }
    return next((name for name, holds in checks.items() if holds), None)


def _is_embedding(use: Use, classes: list[str]) -> bool:
    if use.module is not None:
        by_type = any(map(_EMBEDDING_CLASS.search, classes))
        return by_type or bool(_words(use.name) & _EMBEDDING_WORDS)
    words = set().union(*map(_words, use.fqn.split(".")[-2:]))
    return bool(words & {*_EMBEDDING_WORDS, "wte", "wpe"})


def _is_head(use: Use, heads: Heads) -> bool:
    segments = use.fqn.split(".")
    top = next(itertools.dropwhile(_TRANSPARENT.__contains__, segments), "")
    by_name = top in _HEADS_ON_TOP or top.split("_")[-1] in ("head", "heads")
    if by_name or _HEADS_ANYWHERE & set(segments) or id(use.parameter) in heads.head_ids:
        return True
    # In a numbered block the shape proves nothing: with 256 byte tokens of width 64, a head and
    # the first weight of every MLP are both 256 x 64.
    in_block = any(segment.isdecimal() for segment in segments[:-2])
    return not in_block and tuple(use.parameter.shape) in heads.embedding_shapes
