"""What a model says about its parameters: names, ties, module types and global logical shapes.

It is the same for a plain model, a meta model, every DTensor layout, and a pipeline stage that
holds part of a model.
"""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

# Segments that wrappers put into names: torch.compile, activation checkpointing, Lightning Fabric.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_forward_module", "_original_module"}
_POSITION_WORDS = {"wpe", "pos", "position", "positions", "positional", "type", "segment"}

CONVS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_TRANSPOSED_CONVS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_MAPS = (nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, *CONVS)
_MAP_CLASS = re.compile(r"Linear|Conv(Transpose)?\d[dD]")


class Place(NamedTuple):
    """One step on the way from a model to a module: its name there, and what is found there."""

    name: str
    kind: str = ""
    in_sequential: bool = False


@dataclass(frozen=True, eq=False)
class Use:
    """One place where a parameter is held; a tied parameter has several.

    Attributes:
        fqn: Name in checkpoints.
        name: Own name in the module that holds it.
        module: That module; None where only names are known.
        path: The way to that module, without wrappers.
        parameter: The parameter.
    """

    fqn: str
    name: str
    module: nn.Module | None
    path: tuple[Place, ...]
    parameter: nn.Parameter

    @property
    def classes(self) -> list[str]:
        """Class of the module that holds it, and its bases."""
        return [cls.__name__ for cls in type(self.module).__mro__] if self.module else []

    @property
    def is_map(self) -> bool:
        """Whether it is applied as a linear map, by the type of its module."""
        if len(self.parameter.shape) < 2:
            return False
        if self.module is None:  # by name only
            return "weight" in words(self.name)
        return isinstance(self.module, _MAPS) or any(map(_MAP_CLASS.search, self.classes))

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of features that a map gives and takes; an embedding takes none."""
        shape = tuple(self.parameter.shape)
        if isinstance(self.module, nn.Embedding):
            return shape[1], 0
        if isinstance(self.module, CONVS) and len(shape) > 2:
            first, second = shape[0], shape[1] * self.module.groups
            turned = isinstance(self.module, _TRANSPOSED_CONVS)
        else:
            first, second = shape[-2:]
            turned = "Conv1D" in self.classes  # of transformers: in x out
        return (second, first) if turned else (first, second)


@dataclass(frozen=True)
class Facts:
    """What a model as a whole says.

    Attributes:
        head_ids: Parameters of heads that it declares.
        embedding_shapes: Shapes of its embeddings, but for those of positions.
        no_decay_ids: Parameters that it wants without weight decay.
        maps: All its linear maps and embeddings, frozen ones too, in order of registration.
        shared: The way that all uses have in common.
    """

    head_ids: frozenset[int] = frozenset()
    embedding_shapes: frozenset[tuple[int, ...]] = frozenset()
    no_decay_ids: frozenset[int] = frozenset()
    maps: tuple[Use, ...] = ()
    shared: tuple[Place, ...] = ()

    def earlier(self, use: Use) -> Iterator[Use]:
        """Yield the maps that are registered before this one."""
        for other in self.maps:
            if other.parameter is use.parameter:
                return
            yield other


def clean_fqn(name: str) -> str:
    """Return a name, or segments of one, without what wrappers put into it."""
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)


@functools.lru_cache(maxsize=4096)
def words(name: str) -> frozenset[str]:
    """Return the words of a name in snake case, or of a class in camel case."""
    return frozenset(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def read_model(
    model: nn.Module | Iterable[tuple[str, nn.Parameter]],
) -> tuple[list[list[Use]], Facts]:
    """Return the uses of each trainable parameter together, and what the model says as a whole."""
    if isinstance(model, nn.Module):
        model = _unwrap(model)
        uses = _from_root(_checked(_module_uses(model)))
        facts = _facts(model)
    else:
        uses, facts = _checked(_named_uses(model)), Facts()
    maps = tuple(use for use in uses if use.is_map or isinstance(use.module, nn.Embedding))
    by_parameter: dict[int, list[Use]] = {}
    for use in uses:
        if use.parameter.requires_grad:
            by_parameter.setdefault(id(use.parameter), []).append(use)
    return list(by_parameter.values()), replace(facts, maps=maps, shared=_shared(uses))


def _checked(uses: Iterable[Use]) -> list[Use]:
    """Refuse parameters without a shape of their own."""
    uses = list(uses)
    for use in uses:
        if {"_flat_param", "_fsdp_wrapped_module"} & set(use.fqn.split(".")):
            raise ValueError(f"{use.fqn} has lost its shape to FSDP1; use FSDP2's `fully_shard`")
        if is_lazy(use.parameter):
            raise ValueError(f"{use.fqn} has no shape yet; run its lazy module once first")
    return uses


def _named_uses(named: object) -> list[Use]:
    # Materialised once: a second pass over `model.named_parameters()` would find nothing.
    pairs = list(named) if isinstance(named, Iterable) else [named]
    uses = []
    for pair in pairs:
        match pair:
            case (str(fqn), nn.Parameter() as parameter):
                *path, name = clean_fqn(fqn).split(".")
                uses.append(Use(clean_fqn(fqn), name, None, tuple(map(Place, path)), parameter))
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
        inner = getattr(model, "_orig_mod", None) or getattr(model, "_forward_module", None)
        if isinstance(inner, nn.Module):
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
        if "FullyShardedDataParallel" in [cls.__name__ for cls in type(module).__mro__]:
            raise ValueError(f"module {path!r} is FSDP1, not supported; use FSDP2's `fully_shard`")
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            way, name = segments, key
            # These hold the parameters of the module above them.
            if isinstance(module, ParametrizationList) and len(segments) > 1:
                way, name = segments[:-2], segments[-1]
            elif isinstance(module, (nn.ParameterDict, nn.ParameterList)) and segments:
                way, name = segments[:-1], f"{segments[-1]}_{key}"
            fqn = clean_fqn(".".join([*segments, key]))
            yield Use(fqn, name, modules[".".join(way)], _places(way, modules), parameter)


def _places(segments: Sequence[str], modules: dict[str, nn.Module]) -> tuple[Place, ...]:
    """The way to a module, with the types met on it."""
    places = []
    for depth, name in enumerate(segments):
        above, here = (modules[".".join(segments[:end])] for end in (depth, depth + 1))
        if name not in _WRAPPERS:
            places.append(Place(name, type(here).__name__, isinstance(above, nn.Sequential)))
    return tuple(places)


def _shared(uses: list[Use]) -> tuple[Place, ...]:
    """The way to the smallest module that holds all parameters."""
    ways = [use.path[:-1] if use.is_map else use.path for use in uses]
    steps = itertools.takewhile(lambda step: len(set(step)) == 1, zip(*ways, strict=False))
    return tuple(step[0] for step in steps)


def _from_root(uses: list[Use]) -> list[Use]:
    """Leave out numbers that number nothing: `nn.Sequential(model)` has no blocks."""
    shared = _shared(uses)
    kept = tuple(place for place in shared if not (place.in_sequential and place.name.isdecimal()))
    return [replace(use, path=(*kept, *use.path[len(shared) :])) for use in uses]


def _facts(model: nn.Module) -> Facts:
    heads: set[int] = set()
    shapes: set[tuple[int, ...]] = set()
    for path, module in model.named_modules():
        heads.update(map(id, _declared_head(module)))
        if isinstance(module, nn.Embedding) and not words(path.split(".")[-1]) & _POSITION_WORDS:
            shapes.add(tuple(module.weight.shape))
    return Facts(frozenset(heads), frozenset(shapes), frozenset(map(id, _undecayed(model))))


def _declared_head(module: nn.Module) -> Iterable[nn.Parameter]:
    """Parameters of the head that a Hugging Face model declares."""
    try:
        head = module.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # another model, or a stage without its head
        return ()
    return head.parameters() if isinstance(head, nn.Module) else ()


def _undecayed(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that a model marks, as timm's do by a method and state space models one by one."""
    for module in model.modules():
        listed = getattr(module, "no_weight_decay", None)
        names = listed() if callable(listed) else ()
        for name, parameter in module.named_parameters() if names else ():
            if any(name == key or name.endswith(f".{key}") for key in names):
                yield parameter
    for parameter in model.parameters():
        if getattr(parameter, "_no_weight_decay", False):
            yield parameter
