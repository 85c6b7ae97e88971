import dataclasses

import pytest
import torch
from dmuon.newton_schulz.backends import BACKENDS
from dmuon.newton_schulz.symmetric import dense_product

from dmuon.newton_schulz import backends, resolve_coefficients
from dmuon.tuning import autotune, batches
from dmuon.tuning.table import format_table

ORIGINAL = resolve_coefficients("original")
CPU = torch.device("cpu")
CPU_BACKENDS = {name for name in BACKENDS if not name.endswith(("_triton", "_quack"))}


def tuned(shapes=((2, 8, 24), (1, 40, 16)), coefficients=ORIGINAL, dtype=torch.float32):
    return autotune.tune(shapes, coefficients=coefficients, dtype=dtype, device=CPU, repeats=2)


def test_the_table_names_a_backend_that_runs_for_every_shape():
    table = tuned()
    keys = [("float32", 1, 16, 40, 5), ("float32", 2, 8, 24, 5)]
    assert [choice.key for choice in table.choices] == keys
    for choice in table.choices:
        assert choice.milliseconds > 0
        assert choice.backend in CPU_BACKENDS
    text = format_table(table).splitlines()
    titles = ["dtype", "batch", "rows", "columns", "steps", "backend", "split", "ms"]
    assert text[0].split() == titles
    assert len(text) == 3


def test_a_wrong_backend_is_never_chosen(monkeypatch):
    right = batches.orthogonalize

    def wrong_if_gram(x, *, backend, **options):
        result = right(x, backend=backend, **options)
        return result * 1.1 if backend.startswith("gram") else result

    monkeypatch.setattr(batches, "orthogonalize", wrong_if_gram)
    monkeypatch.setattr(autotune, "BACKENDS", ("gram", "newton_schulz"))
    monkeypatch.setattr(autotune, "_milliseconds", lambda *_: 1.0)
    assert {choice.backend for choice in tuned().choices} == {"newton_schulz"}
    monkeypatch.setattr(autotune, "BACKENDS", ("gram",))
    assert tuned().choices == []


def test_a_backend_that_fails_is_left_out_with_a_warning(monkeypatch):
    def fails(*_, **__):
        raise AssertionError("needs another GPU")

    for name in ("_triton", "_quack"):
        # As if it ran here.
        monkeypatch.setitem(backends._PRODUCTS, name, backends._Product(lambda: fails))
    with pytest.warns(UserWarning, match="_(triton|quack) was left out.*needs another GPU"):
        table = tuned()
    assert {choice.backend for choice in table.choices} <= CPU_BACKENDS


def test_lists_and_tuples_of_coefficients_are_taken():
    assert len(tuned(coefficients=list(ORIGINAL)).choices) == 2


@pytest.mark.parametrize("on_cpu", [True, False])
def test_every_way_that_can_run_is_timed(on_cpu, monkeypatch):
    timed = []
    right = batches.orthogonalize

    def recorded(x, *, backend, **options):
        timed.append((backend, len(x)))
        return right(x, backend=backend, **options)

    monkeypatch.setattr(batches, "orthogonalize", recorded)
    if not on_cpu:
        monkeypatch.setattr(autotune, "_SPLITS", {})
    tuned([(5, 8, 16)])
    # All at once; where the engine does not split, also in two, in four, and one by one.
    sizes = {5} if on_cpu else {5, 3, 2, 1}
    assert set(timed) == {(name, size) for name in CPU_BACKENDS for size in sizes}


def test_a_form_without_safe_restarts_is_not_timed():
    table = tuned([(1, 8, 64)], resolve_coefficients("original", 20), torch.bfloat16)
    assert {choice.backend for choice in table.choices} <= {"newton_schulz", "newton_schulz_blocks"}


def test_an_optional_backend_is_chosen_where_it_is_installed_and_faster(monkeypatch):
    quack = backends._Product(lambda: dense_product, module="torch")
    monkeypatch.setitem(backends._PRODUCTS, "_quack", quack)
    monkeypatch.setattr(
        autotune,
        "_milliseconds",
        lambda run, *_: 1.0 if "quack" in run.keywords["backend"] else 2.0,
    )
    (choice,) = tuned([(2, 8, 64)], dtype=torch.float16).choices
    assert choice.backend.endswith("_quack")
    monkeypatch.setitem(
        backends._PRODUCTS, "_quack", dataclasses.replace(quack, module="no_such_package")
    )
    (choice,) = tuned([(2, 8, 64)], dtype=torch.float16).choices
    assert not choice.backend.endswith("_quack")


def test_deterministic_mode_tunes_nothing():
    torch.use_deterministic_algorithms(True)
    try:
        assert tuned().choices == []
    finally:
        torch.use_deterministic_algorithms(False)
