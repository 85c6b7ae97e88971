"""Routing judged on model families: what a parameter does decides, in whatever wrapper."""

import fnmatch
import importlib.util

import pytest
import torch
from torch import nn

from dmuon.routing.rules import param_groups
from tests.support.families_table import DOCS, format_table
from tests.support.model_families import FAMILIES, tree

HIDDEN = {"matrix", "conv", "stack", "fused qkv", "rnn gates"}


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    library = request.param.name.split(".")[0]
    if library == "transformers" and importlib.util.find_spec(library) is None:
        pytest.skip("transformers is not installed")
    return request.param


def rules(model):
    return {fqn: group["rule"] for group in param_groups(model) for fqn, _ in group["params"]}


def expected(family, fqn, shape):
    """The kinds that the table gives a parameter; `{"hidden"}` where it names none."""
    patterns = family.kinds.items()
    found = {kind for kind, names in patterns if any(fnmatch.fnmatchcase(fqn, n) for n in names)}
    if not found and len(shape) < 2:
        return {"vector", "norm", "bias", "embedding", "table"}
    return found or {"hidden"}


def test_every_parameter_is_on_the_side_of_what_it_does(family):
    model = family.build()
    shapes = {fqn: p.shape for fqn, p in model.named_parameters()}
    found = rules(model)
    wrong = {
        fqn: rule
        for fqn, rule in found.items()
        if ("hidden" if rule in HIDDEN else rule) not in expected(family, fqn, shapes[fqn])
    }
    assert wrong == {}


def test_every_kind_of_the_table_is_there(family):
    found = rules(family.build())
    for kind, names in family.kinds.items():
        matched = [fqn for fqn in found if any(fnmatch.fnmatchcase(fqn, n) for n in names)]
        assert matched, (kind, names)


class ForwardModule(nn.Module):
    """As Lightning Fabric wraps a model."""

    def __init__(self, model):
        super().__init__()
        self._forward_module = model
        self._original_module = model


WRAPPERS = {
    "attribute": lambda model: tree(net=model),
    "Sequential": lambda model: nn.Sequential(nn.Identity(), model),
    "module": lambda model: tree(module=model),
    "compile": lambda model: torch.compile(model, backend="eager"),
    "Fabric": ForwardModule,
    "trainer": lambda model: tree(
        "LightningModule", student=torch.compile(tree(module=model), backend="eager")
    ),
}


def test_routing_does_not_depend_on_wrappers(family):
    model = family.build()
    bare = [(group["rule"], [id(p) for _, p in group["params"]]) for group in param_groups(model)]
    for name, wrap in WRAPPERS.items():
        groups = param_groups(wrap(model))
        assert bare == [(g["rule"], [id(p) for _, p in g["params"]]) for g in groups], name


def test_there_are_enough_families():
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 40


def test_the_table_in_the_docs_is_that_of_the_families():
    renew = "run python -m tests.support.families_table to renew docs/routing.md"
    assert format_table() in DOCS.read_text(), renew
