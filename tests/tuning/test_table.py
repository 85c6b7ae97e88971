"""Tables of measured choices on disk."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import dmuon
from dmuon.newton_schulz import Backend
from dmuon.plan.cost import Choice, Timings
from dmuon.tuning.table import VERSION, default_path, format_timings, load, save

CPU = torch.device("cpu")


def choice(batch, rows, columns, milliseconds):
    backend = Backend("gram", "triton")
    return Choice("float32", batch, rows, columns, 5, backend, 1, milliseconds)


TUNED = Timings((choice(2, 8, 24, 1.5), choice(1, 16, 40, 2.5)))


def test_saved_timings_are_read_back(tmp_path):
    path = tmp_path / "new" / "table.json"
    save(path, TUNED)
    assert load(path) == TUNED
    assert load(str(path)).digest == TUNED.digest
    assert '"gram+triton"' in path.read_text()
    save(path, Timings())
    assert load(path) == Timings()
    assert list(path.parent.iterdir()) == [path]
    # As any file of this user: the table may be shared.
    other = tmp_path / "other"
    other.write_text("")
    assert path.stat().st_mode == other.stat().st_mode


def test_devices_and_versions_have_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path))
    path = default_path(CPU)
    assert path.parent == tmp_path
    assert default_path(torch.device("meta")) != path
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fast 1/2")
    assert default_path(torch.device("cuda")).name.startswith("Fast_1_2_torch")
    for place, name, value in (
        (torch, "get_num_threads", lambda: 1234),
        (torch, "__version__", "9.9.9"),
        (dmuon, "__version__", "9.9.9"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert default_path(CPU) != path
    monkeypatch.delenv("DMUON_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_path(CPU).parent == tmp_path / "home" / ".cache" / "dmuon"


ROW = {"dtype": "float32", "batch": 1, "rows": 4, "columns": 8, "steps": 5}
ROW |= {"backend": "gram+dense", "parts": 1, "milliseconds": 1.0}


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[1]", '{"a": 1}', "\x00", "null", "[" * 100_000, None),
        *(
            json.dumps({"version": VERSION, "choices": [{**ROW, **change}]})
            for change in (
                {"backend": "quick"},
                {"backend": None},
                {"milliseconds": "fast"},
                {"rows": 9},
                {"extra": 1},
                {"batch": 10**400, "parts": 0},
            )
        ),
        json.dumps({"version": VERSION, "choices": [7]}),
        json.dumps({"version": VERSION - 1, "choices": [ROW]}),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(tmp_path, content):
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"table\.json.*dmuon tune"):
        load(path)


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    save(path, Timings())

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        save(path, TUNED)
    assert list(tmp_path.iterdir()) == [path]
    assert load(path) == Timings()


def test_concurrent_writers_leave_a_file_that_can_be_read(tmp_path):
    path = tmp_path / "table.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: save(path, TUNED), range(40)))
    assert load(path) == TUNED


def test_choices_are_printed_in_columns():
    text = format_timings(TUNED).splitlines()
    assert text[0].split() == [
        "dtype",
        "batch",
        "rows",
        "columns",
        "steps",
        "backend",
        "parts",
        "ms",
    ]
    assert text[1].split() == ["float32", "1", "16", "40", "5", "gram+triton", "1", "2.500"]
    assert len({len(line) for line in text}) == 1
