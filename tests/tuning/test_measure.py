"""Candidates are compared with float64 and timed once, within a budget."""

import logging
import time

import pytest
import torch

from dmuon.newton_schulz import Backend, Method, choice, resolve_coefficients
from dmuon.newton_schulz.backend import BACKENDS, PLAIN
from dmuon.newton_schulz.products import dense_product
from dmuon.tuning import measure as module
from dmuon.tuning.measure import BatchKind, measure
from dmuon.tuning.table import load, save

CPU = torch.device("cpu")
METHOD = Method(resolve_coefficients("original"), 1e-7, torch.float32)
KINDS = [BatchKind(METHOD, 2, (8, 24)), BatchKind(METHOD, 1, (16, 40))]
ON_CPU = {backend for backend in BACKENDS if backend.product in {"dense", "blocks"}}


@pytest.fixture
def tried(monkeypatch):
    """Return the (backend, batch) that were run, in order; every one takes as long as the next."""
    found, right = [], module.orthogonalize_stack

    def recorded(stack, method, backend, parts=1):
        if method.dtype != torch.float64:
            found.append((backend, len(stack)))
        return right(stack, method, backend, parts)

    monkeypatch.setattr(module, "orthogonalize_stack", recorded)
    return found


def test_a_backend_that_runs_is_named_for_every_kind():
    timings = measure(KINDS, CPU)
    keys = [("float32", 1, 16, 40, 5), ("float32", 2, 8, 24, 5)]
    assert [found.key for found in timings.choices] == keys
    for found in timings.choices:
        assert found.milliseconds > 0
        assert found.backend in ON_CPU


def test_every_way_that_can_run_is_tried_from_the_default_on(tried):
    measure(KINDS[:1], CPU)
    assert tried[0] == (PLAIN, 2)
    assert set(tried) == {(backend, 2) for backend in ON_CPU}


def test_a_wrong_backend_is_never_chosen(monkeypatch):
    right = module.orthogonalize_stack

    def wrong_but_plain(stack, method, backend, parts=1):
        # On the last matrix alone.
        result = right(stack, method, backend, parts)
        if backend != PLAIN:
            result[-1] *= 1.1
        return result

    monkeypatch.setattr(module, "orthogonalize_stack", wrong_but_plain)
    assert {c.backend for c in measure(KINDS, CPU).choices} == {PLAIN}
    monkeypatch.setattr(module, "BACKENDS", (Backend("gram", "dense"),))
    assert measure(KINDS, CPU).choices == ()


def test_a_backend_that_fails_is_left_out_with_a_warning(monkeypatch):
    # As if it ran here.
    monkeypatch.setitem(choice._NEEDS, "quack", choice._Needs("cpu"))
    with pytest.warns(UserWarning, match=r"quack was left out.*quack"):
        timings = measure(KINDS[:1], CPU)
    assert {c.backend for c in timings.choices} <= ON_CPU


def test_an_optional_backend_is_chosen_where_it_is_installed_and_faster(monkeypatch):
    from dmuon.newton_schulz import polar

    monkeypatch.setitem(choice._NEEDS, "quack", choice._Needs("cpu", module="torch"))
    monkeypatch.setattr(polar, "load_product", lambda product: dense_product)
    monkeypatch.setattr(
        module, "_least_milliseconds", lambda run, _: 1.0 if run.args[2].product == "quack" else 2.0
    )
    (found,) = measure(KINDS[:1], CPU).choices
    assert found.backend.product == "quack"
    monkeypatch.setitem(choice._NEEDS, "quack", choice._Needs("cpu", module="no_such_package"))
    (found,) = measure(KINDS[:1], CPU).choices
    assert found.backend.product != "quack"


def test_a_form_that_is_not_safe_is_not_timed(tried):
    method = Method(resolve_coefficients("polar_express"), 1e-7, torch.bfloat16)
    measure([BatchKind(method, 1, (8, 24))], CPU)
    assert {backend.form for backend, _ in tried} == {"newton_schulz"}


def test_the_heaviest_kinds_come_first_and_the_budget_ends_it(tried, monkeypatch, caplog):
    clock = [0.0]

    def ticking():
        clock[0] += 1.0
        return clock[0]

    monkeypatch.setattr(time, "monotonic", ticking)
    with caplog.at_level(logging.INFO, "dmuon"):
        timings = measure(KINDS, CPU, budget_s=3.5)
    # One backend of the first kind, which would also run without timings.
    assert [c.key for c in timings.choices] == [("float32", 1, 16, 40, 5)]
    assert {backend for backend, _ in tried} <= {PLAIN, BACKENDS[0], BACKENDS[1]}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("tuning 1 of 2, ")
    assert "of 4 s: 1 x 16 x 40 in float32: newton_schulz+" in lines[0]
    assert lines[1].endswith("2 x 8 x 24 in float32: not measured")


def test_what_was_measured_before_is_not_measured_again(tried, tmp_path):
    cache = tmp_path / "folder" / "cache.json"
    first = measure(KINDS[:1], CPU, cache=cache)
    assert load(cache) == first
    tried.clear()
    both = measure(KINDS, CPU, cache=cache)
    assert {batch for _, batch in tried} == {1}
    assert first.choices[0] in both.choices
    assert load(cache) == both
    tried.clear()
    # Only what was asked for comes back.
    assert measure(KINDS[:1], CPU, cache=cache) == first
    assert not tried


def test_an_unreadable_cache_is_replaced_and_one_that_cannot_be_written_is_no_error(
    tmp_path, monkeypatch
):
    cache = tmp_path / "cache.json"
    cache.write_text("{")
    found = measure(KINDS[:1], CPU, cache=cache)
    assert load(cache) == found

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(module, "save", full)
    with pytest.warns(UserWarning, match="no space"):
        assert len(measure(KINDS, CPU, cache=cache).choices) == 2


def test_deterministic_mode_measures_and_reads_nothing(tmp_path):
    cache = tmp_path / "cache.json"
    save(cache, measure(KINDS, CPU))
    torch.use_deterministic_algorithms(True)
    try:
        assert measure(KINDS, CPU, cache=cache).choices == ()
    finally:
        torch.use_deterministic_algorithms(False)
