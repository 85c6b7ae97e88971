import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dmuon.orthogonalize import autotune, resolve_coefficients

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
        assert not choice.backend.endswith("triton")
    text = autotune.format_table(table).splitlines()
    assert text[0].split() == ["dtype", "batch", "rows", "columns", "backend", "split", "ms"]
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


def test_a_saved_table_is_read_back_and_merged(tmp_path):
    path = autotune.cache_path(tmp_path / "new", CPU)
    table = tuned()
    first, second = ({key: choice} for key, choice in table.items())
    autotune.save(path, first)
    autotune.save(path, second)
    assert autotune.load(path) == table
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"a": 1}', '[{"dtype": "float32"}]', "\x00", "null"]
)
def test_a_corrupt_cache_counts_as_empty_and_is_replaced(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content)
    assert autotune.load(path) == {}
    table = tuned()
    autotune.save(path, table)
    assert autotune.load(path) == table


def test_concurrent_writers_leave_a_file_that_can_be_read(tmp_path):
    path = tmp_path / "table.json"
    table = tuned()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: autotune.save(path, table), range(40)))
    assert autotune.load(path) == table
    json.loads(path.read_text())
