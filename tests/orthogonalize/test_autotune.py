import torch

from dmuon.orthogonalize import autotune, resolve_coefficients
from dmuon.orthogonalize.backends import BACKENDS
from dmuon.orthogonalize.table import format_table

ORIGINAL = resolve_coefficients("original")
CPU = torch.device("cpu")


def tuned():
    return autotune.tune(
        [(2, 8, 24), (1, 40, 16)],
        coefficients=ORIGINAL,
        dtype=torch.float32,
        device=CPU,
        repeats=2,
    )


def test_the_table_names_a_backend_that_runs_for_every_shape():
    table = tuned()
    assert set(table) == {("float32", 2, 8, 24), ("float32", 1, 16, 40)}
    for choice in table.values():
        assert choice.milliseconds > 0
        assert choice.steps == 5
        assert 1 <= choice.split <= choice.batch
        assert not choice.backend.endswith("triton")
    text = format_table(table).splitlines()
    assert text[0].split() == [
        "dtype",
        "batch",
        "rows",
        "columns",
        "steps",
        "backend",
        "split",
        "ms",
    ]
    assert len(text) == 3


def test_a_wrong_backend_is_never_chosen(monkeypatch):
    right = autotune.orthogonalize

    def wrong_if_gram(x, *, coefficients, backend):
        result = right(x, coefficients=coefficients, backend=backend)
        return result * 1.1 if backend.startswith("gram") else result

    monkeypatch.setattr(autotune, "orthogonalize", wrong_if_gram)
    monkeypatch.setattr(autotune, "BACKENDS", ("gram", "newton_schulz"))
    monkeypatch.setattr(autotune, "_time", lambda run, x, repeats: 1.0)
    assert {choice.backend for choice in tuned().values()} == {"newton_schulz"}


def test_deterministic_mode_tunes_nothing():
    torch.use_deterministic_algorithms(True)
    try:
        assert tuned() == {}
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_way_that_can_run_is_timed(monkeypatch):
    timed = []
    right = autotune.orthogonalize

    def recorded(x, *, coefficients, backend):
        timed.append((backend, len(x)))
        return right(x, coefficients=coefficients, backend=backend)

    monkeypatch.setattr(autotune, "orthogonalize", recorded)
    autotune.tune([(5, 8, 16)], coefficients=ORIGINAL, dtype=torch.float32, device=CPU, repeats=1)
    ways = {name for name in BACKENDS if not name.endswith(("_triton", "_quack"))}
    # All at once, in two, in four, and one by one.
    assert set(timed) == {(name, size) for name in ways for size in (5, 3, 2, 1)}


def test_a_form_without_safe_restarts_is_not_timed():
    choices = autotune.tune(
        [(1, 8, 64)],
        coefficients=resolve_coefficients("cans"),
        dtype=torch.bfloat16,
        device=CPU,
        repeats=1,
    )
    assert {choice.backend for choice in choices.values()} <= {
        "newton_schulz",
        "newton_schulz_blocks",
    }
