"""Tables of measured choices: on disk, and what is read off them."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from dmuon.tuning.table import (
    CACHE_VERSION,
    Choice,
    Table,
    cache_path,
    load,
    load_strict,
    save,
)

CPU = torch.device("cpu")
FP32 = torch.float32


def choice(batch, rows, columns, milliseconds, *, steps=5, dtype="float32"):
    return Choice(dtype, batch, rows, columns, steps, "newton_schulz", 1, milliseconds)


TUNED = [choice(2, 8, 24, 1.5), choice(1, 16, 40, 2.5), choice(2, 8, 24, 3.0, steps=10)]


def test_the_entry_of_the_nearest_steps_and_batch_counts():
    one, eight, ten = choice(1, 4, 8, 1.0), choice(8, 4, 8, 2.0), choice(1, 4, 8, 9.0, steps=10)
    table = Table([one, eight, ten])
    found = {batch: table.find(FP32, 5, batch, (4, 8)) for batch in (1, 4, 5, 100)}
    assert found == {1: one, 4: one, 5: eight, 100: eight}
    assert table.find(FP32, 7, 1, (4, 8)) == one
    assert table.find(FP32, 8, 8, (4, 8)) == ten
    assert table.find(FP32, 5, 1, (4, 9)) is None
    assert table.find(torch.bfloat16, 5, 1, (4, 8)) is None


def test_the_time_of_a_batch_is_interpolated_between_measured_ones():
    table = Table([choice(2, 4, 8, 15.0), choice(4, 4, 8, 20.0), choice(8, 4, 8, 50.0)])
    seconds = {batch: table.seconds(FP32, 5, batch, (4, 8)) for batch in (1, 2, 3, 4, 6, 16)}
    # Of one step.
    assert seconds == pytest.approx({1: 1.5e-3, 2: 3e-3, 3: 3.5e-3, 4: 4e-3, 6: 7e-3, 16: 20e-3})
    assert table.seconds(FP32, 5, 1, (8, 8)) is None


def test_a_step_of_one_matrix_costs_its_share_of_the_smallest_batch():
    table = Table(
        [
            choice(2, 4, 8, 10.0),
            choice(4, 4, 8, 12.0),
            choice(1, 4, 8, 2.0, steps=10, dtype="bfloat16"),
            choice(1, 8, 8, 3.0, steps=3),
        ]
    )
    assert table.seconds_per_step() == pytest.approx(
        {("float32", (4, 8)): 1e-3, ("bfloat16", (4, 8)): 2e-4, ("float32", (8, 8)): 1e-3}
    )


def test_a_table_is_as_if_empty_in_deterministic_mode():
    table = Table(TUNED)
    torch.use_deterministic_algorithms(True)
    try:
        assert table.find(FP32, 5, 2, (8, 24)) is None
        assert table.seconds(FP32, 5, 2, (8, 24)) is None
        assert table.seconds_per_step() == {}
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_saved_table_is_read_back_and_merged(tmp_path):
    path = cache_path(tmp_path / "new", CPU)
    save(path, Table(TUNED[:1]))
    save(path, Table(TUNED[1:]))
    assert load(path).choices == Table(TUNED).choices
    assert list(path.parent.iterdir()) == [path]
    # As any file of this user: the table may be shared.
    other = tmp_path / "other"
    other.write_text("")
    assert path.stat().st_mode == other.stat().st_mode


def test_a_newer_choice_replaces_the_older_one(tmp_path):
    path = tmp_path / "table.json"
    newer = choice(2, 8, 24, 0.5)
    save(path, Table(TUNED))
    save(path, Table([newer]))
    assert load(path).choices == Table([*TUNED, newer]).choices
    assert newer in load(path).choices


def test_devices_have_files_of_their_own(tmp_path, monkeypatch):
    path = cache_path(tmp_path, CPU)
    assert cache_path(tmp_path, torch.device("meta")) != path
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1234)
    assert cache_path(tmp_path, CPU) != path
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fast 1/2")
    assert cache_path(tmp_path, torch.device("cuda")) == tmp_path / "Fast_1_2.json"


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", '{"a": 1}', '[{"dtype": "float32"}]', "\x00", "null", "[" * 100_000],
)
def test_a_corrupt_cache_counts_as_empty_and_is_replaced(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content)
    assert load(path).choices == []
    save(path, Table(TUNED))
    assert load(path).choices == Table(TUNED).choices


@pytest.mark.parametrize(
    "change",
    [
        {"milliseconds": float("nan")},
        {"milliseconds": float("inf")},
        {"milliseconds": 0.0},
        {"milliseconds": "fast"},
        {"split": 1.5},
        {"split": 0},
        {"rows": "4"},
        {"rows": 25},
        {"batch": True},
        {"batch": 2**31},
        {"columns": 10**400},
        {"milliseconds": 10**400},
        {"steps": -1},
        {"dtype": None},
        {"backend": "quick"},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_bad_row_is_dropped_alone(tmp_path, change):
    path = tmp_path / "table.json"
    good, bad = TUNED[1], asdict(TUNED[0]) | change
    path.write_text(json.dumps({"version": CACHE_VERSION, "choices": [bad, asdict(good), 7]}))
    assert load(path).choices == [good]
    save(path, Table(TUNED))
    assert load(path).choices == Table(TUNED).choices


def test_a_whole_number_of_milliseconds_is_read(tmp_path):
    path = tmp_path / "table.json"
    row = asdict(TUNED[0]) | {"milliseconds": 2}
    path.write_text(json.dumps({"version": CACHE_VERSION, "choices": [row]}))
    assert [choice.milliseconds for choice in load(path).choices] == [2.0]


def test_a_file_of_another_version_counts_as_empty(tmp_path):
    path = tmp_path / "table.json"
    content = {"version": CACHE_VERSION - 1, "choices": [asdict(TUNED[0])]}
    path.write_text(json.dumps(content))
    assert load(path).choices == []
    with pytest.raises(ValueError, match="dmuon tune"):
        load_strict(path)


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    save(path, Table(TUNED[:1]))

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        save(path, Table(TUNED))
    assert list(tmp_path.iterdir()) == [path]
    assert load(path).choices == TUNED[:1]


def test_concurrent_writers_leave_a_file_that_can_be_read(tmp_path):
    path = tmp_path / "table.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: save(path, Table(TUNED)), range(40)))
    assert load(path).choices == Table(TUNED).choices
