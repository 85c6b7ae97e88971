"""What a parameter is to its model, where that is no hidden weight: small rules on evidence.

[Note: inner and outer layers] Names alone mislead: the two large matrices in a `classifier` of VGG
are hidden ones, and the `output` of an attention layer is no output of the model. So a name only
proposes a layer, and the sizes of the other maps decide: a layer whose outputs another one takes is
no output layer, and one whose inputs an earlier one gives is no input layer. Nothing in a numbered
block, in an attention layer or in an MLP of one is either.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from dmuon.routing.evidence import CONVS, Facts, Place, Use, words

_NORM_CLASS = re.compile(r"Norm(\dd)?$")
_EMBEDDING_CLASS = re.compile(r"Embedding(s|Bag)?$")
_EMBEDDING_WORDS = {"emb", "embed", "embeds", "embedding", "embeddings"}
_ADDED_WORDS = {"pos", "position", "positions", "positional", "rel", "relative"}

_HEAD_WORDS = {
    *("head", "heads", "classifier", "classifiers", "classif", "cls", "class", "bbox", "score"),
    *("unembed", "unembedding", "predict", "pred", "prediction", "predictions", "predictor"),
    *("logits", "out", "output", "outputs", "last", "actor", "critic"),
}
_HEADS_ANYWHERE = {"lm_head", "embed_out"}
_INPUT_WORDS = {"input", "inputs", "patch", "patches", "patchify", "state", "stem"}
_INPUT_CLASS = re.compile(r"PatchEmbed|Stem")
# Layers within a network, or what comes before its last layer.
_INNER_WORDS = {
    *("attn", "attention", "mlp", "mlps", "ff", "ffn", "norm", "pre", "time", "timestep"),
    *("block", "blocks", "layers", "stages"),
}
_MAP_WORDS = {
    *("weight", "weights", "kernel", "proj", "projection", "linear", "dense", "matrix", "lora"),
    *("expert", "experts", "layers", "router", "gate", "up", "down", "qkv"),
}
_FC = re.compile(r"fc\d+")
_SHORT_MAP_WORD = re.compile(r"(w[a-z]?|w\d+|fc\d*|wqkv)$")
_TABLE_WORDS = {
    *_ADDED_WORDS,
    *("token", "tokens", "query", "queries", "latent", "latents", "probe", "prompt", "prompts"),
    *("register", "registers", "slot", "slots", "memory", "prototypes", "centroids", "anchors"),
    *("table", "codebook", "codebooks", "codevectors", "biases", "shift", "scale", "gamma", "beta"),
    *("alpha", "log", "mean", "std", "mix", "freqs", "frequencies", "rotation", "modulation"),
}


def role(use: Use, facts: Facts, *, find_input: bool) -> str | None:
    """Return what a parameter is to its model where that is no hidden weight, else None.

    Args:
        use: Where the parameter is held.
        facts: What the model says as a whole.
        find_input: Whether layers that take the data have a role of their own.
    """
    checks: tuple[tuple[str, Callable[[Use, Facts], bool]], ...] = (
        ("norm", _is_norm),
        ("bias", _is_bias),
        ("embedding", _is_lookup),
        ("head", _is_head),
        ("vector", _is_vector),
        ("table", _is_table),
        ("embedding", _is_embedding),
        *((("input", _is_input),) if find_input else ()),
        ("doubtful", _is_doubtful),
    )
    return next((name for name, holds in checks if holds(use, facts)), None)


def _is_norm(use: Use, facts: Facts) -> bool:
    return any(map(_NORM_CLASS.search, use.classes))


def _is_bias(use: Use, facts: Facts) -> bool:
    # A layer called so adds what it gives: relative positions as one-hot vectors, say.
    layer = words(use.path[-1].name) if use.is_map and use.path else frozenset()
    return "bias" in words(use.name) | layer


def _is_vector(use: Use, facts: Facts) -> bool:
    return len(use.parameter.shape) < 2


def _is_lookup(use: Use, facts: Facts) -> bool:
    return isinstance(use.module, (nn.Embedding, nn.EmbeddingBag))


def _is_embedding(use: Use, facts: Facts) -> bool:
    if use.module is not None:
        by_type = any(map(_EMBEDDING_CLASS.search, use.classes))
        return by_type or bool(words(use.name) & _EMBEDDING_WORDS)
    found = words(use.name).union(*(words(place.name) for place in use.path[-1:]))
    return bool(found & {*_EMBEDDING_WORDS, "wte", "wpe"})


def _is_table(use: Use, facts: Facts) -> bool:
    """Whether a raw parameter is looked up in or added, by its name or its model's word on decay.

    Tokens, queries, tables of positions and of modulation, codebooks, and the like.
    """
    shape, own = tuple(use.parameter.shape), words(use.name)
    if use.is_map:
        return False
    is_bare = min(shape[-2:]) > 1 and not {"experts", "proj"} & own
    one_of_one = len(shape) > 2 and shape[0] == 1 and is_bare
    if id(use.parameter) in facts.no_decay_ids or one_of_one:
        return True
    if own <= {"weight", "weights"}:  # says nothing, but its module may
        own |= _holder_words(use)
    elif _is_map_name(own):
        return False
    return bool(own & _TABLE_WORDS)


def _is_doubtful(use: Use, facts: Facts) -> bool:
    """Whether nothing tells what a raw parameter of two or more dims is for."""
    shape = tuple(use.parameter.shape)
    return not use.is_map and min(shape[-2:]) > 1 and not _is_map_name(words(use.name))


def _is_map_name(own: frozenset[str]) -> bool:
    return bool(own & _MAP_WORDS) or any(map(_SHORT_MAP_WORD.match, own))


def _holder_words(use: Use) -> frozenset[str]:
    names = [*use.classes[:1], *(place.name for place in use.path[-1:])]
    return frozenset().union(*map(words, names))


def _is_head(use: Use, facts: Facts) -> bool:
    if not use.is_map or isinstance(use.module, nn.MultiheadAttention):
        return False
    if (at := _named_head(use, facts)) is not None:
        return not _is_taken(use, use.path[: at + 1], facts)
    if id(use.parameter) in facts.head_ids:
        return True
    # In a numbered block the shape proves nothing: with 256 byte tokens of width 64, a head and
    # the first weight of every MLP are both 256 x 64.
    in_block = any(place.name.isdecimal() for place in use.path[:-1])
    return not in_block and tuple(use.parameter.shape) in facts.embedding_shapes


def _named_head(use: Use, facts: Facts) -> int | None:
    """Where on the way to a layer something is called a head, outside of blocks."""
    names = [place.name for place in use.path]
    if anywhere := _HEADS_ANYWHERE & set(names):
        return names.index(anywhere.pop())
    for at, place in enumerate(use.path):
        if _is_inner(place.name) or _EMBEDDING_CLASS.search(place.kind):
            return None
        if _is_called_head(names[at:], whole=at == len(facts.shared)):
            return None if _is_in_block(names[at + 1 :]) else at
    return None


def _is_called_head(names: list[str], *, whole: bool) -> bool:
    """Whether the first of these names, of a module and those below it, is that of a head.

    `fc` is the usual name of the last layer, `fc3` only in the whole network itself.
    """
    name, *below = names
    is_fc = name == "fc" or (whole and not below and _FC.fullmatch(name) is not None)
    is_decoder = name == "decoder" and all(map(str.isdecimal, below))
    return bool(words(name) & _HEAD_WORDS) or is_fc or is_decoder


def _is_inner(name: str) -> bool:
    return name.isdecimal() or bool(words(name) & _INNER_WORDS)


def _is_in_block(names: list[str]) -> bool:
    """Whether a number is followed by two names, as in `layers.0.attn.proj`; not in `mlp.0`."""
    numbers = [at for at, name in enumerate(names) if name.isdecimal()]
    return bool(numbers) and sum(not n.isdecimal() for n in names[numbers[0] :]) > 1


def _is_taken(use: Use, top: tuple[Place, ...], facts: Facts) -> bool:
    """Whether another map takes the outputs of a layer in `top`: one there, or a later one beside.

    See [Note: inner and outer layers].
    """
    earlier = set(map(id, facts.earlier(use)))
    gives = use.sizes[0]
    for other in facts.maps:
        together = other.path[:-1] == use.path[:-1] and use.path[-1].in_sequential
        inside = other.path[: len(top)] == top and not (together and id(other) in earlier)
        beside = other.path[:-1] == top[:-1] and id(other) not in earlier
        is_other = other.parameter is not use.parameter
        if (inside or beside) and is_other and other.sizes[1] == gives:
            return True
    return False


def _is_input(use: Use, facts: Facts) -> bool:
    if not use.is_map or use.module is None or not use.path:
        return False
    by_type = isinstance(use.module, CONVS) and (use.sizes[1] <= 4 or _is_first(use, facts))
    if not (by_type or _is_named_input(use)):
        return False
    return all(other.sizes[0] != use.sizes[1] for other in facts.earlier(use))


def _is_first(use: Use, facts: Facts) -> bool:
    """Whether nothing is registered before a layer, and no number says that something was."""
    is_first = facts.maps[0].parameter is use.parameter
    return is_first and not any(int(p.name) for p in use.path if p.name.isdecimal())


def _is_named_input(use: Use) -> bool:
    """Whether a layer, or what it stands in, is called an input, outside of blocks."""
    for at, place in enumerate(use.path):
        found, is_last = words(place.name), at + 1 == len(use.path)
        if found & _INPUT_WORDS or _INPUT_CLASS.search(place.kind):
            return True
        if _is_inner(place.name):
            return False
        embeds = is_last or isinstance(use.module, CONVS) or use.path[-1].name == "proj"
        if "in" in found or (embeds and found & {*_EMBEDDING_WORDS, "embedder"}):
            return True
    return False
