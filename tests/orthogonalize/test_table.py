"""Tables of measured choices: on disk, and what is read off them."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dmuon.orthogonalize import table
from dmuon.orthogonalize.table import Choice, batch_seconds, find, seconds_per_step

CPU = torch.device("cpu")


def choice(batch, rows, columns, milliseconds, *, steps=5, dtype="float32"):
    return Choice(dtype, batch, rows, columns, steps, "newton_schulz", 1, milliseconds)


def table_of(*choices):
    return {each.key: each for each in choices}


def tuned():
    return table_of(choice(2, 8, 24, 1.5), choice(1, 16, 40, 2.5))


def test_the_entry_of_the_nearest_batch_size_counts():
    choices = table_of(choice(1, 4, 8, 1.0), choice(8, 4, 8, 2.0))
    batches = {batch: find(choices, torch.float32, batch, 4, 8).batch for batch in (1, 4, 5, 100)}
    assert batches == {1: 1, 4: 1, 5: 8, 100: 8}
    assert find(choices, torch.float32, 1, 4, 9) is None
    assert find(choices, torch.bfloat16, 1, 4, 8) is None


def test_the_time_of_a_batch_is_interpolated_between_measured_ones():
    choices = table_of(choice(2, 4, 8, 3.0), choice(4, 4, 8, 4.0), choice(8, 4, 8, 10.0))
    seconds = {b: batch_seconds(choices, torch.float32, b, 4, 8) for b in (1, 2, 3, 4, 6, 16)}
    assert seconds == pytest.approx({1: 1.5e-3, 2: 3e-3, 3: 3.5e-3, 4: 4e-3, 6: 7e-3, 16: 20e-3})
    assert batch_seconds(choices, torch.float32, 1, 8, 8) is None


def test_a_step_of_one_matrix_costs_its_share_and_the_slowest_dtype_counts():
    choices = table_of(
        choice(2, 4, 8, 10.0),
        choice(4, 4, 8, 12.0),
        choice(1, 4, 8, 2.0, steps=10, dtype="bfloat16"),
        choice(1, 8, 8, 3.0, steps=3),
    )
    assert seconds_per_step(choices) == pytest.approx({(4, 8): 1e-3, (8, 8): 1e-3})


def test_nothing_is_looked_up_in_deterministic_mode():
    choices = table_of(choice(1, 4, 8, 1.0))
    torch.use_deterministic_algorithms(True)
    try:
        assert find(choices, torch.float32, 1, 4, 8) is None
        assert batch_seconds(choices, torch.float32, 1, 4, 8) is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_saved_table_is_read_back_and_merged(tmp_path):
    path = table.cache_path(tmp_path / "new", CPU)
    choices = tuned()
    first, second = ({key: choice} for key, choice in choices.items())
    table.save(path, first)
    table.save(path, second)
    assert table.load(path) == choices
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"a": 1}', '[{"dtype": "float32"}]', "\x00", "null"]
)
def test_a_corrupt_cache_counts_as_empty_and_is_replaced(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content)
    assert table.load(path) == {}
    choices = tuned()
    table.save(path, choices)
    assert table.load(path) == choices


def test_concurrent_writers_leave_a_file_that_can_be_read(tmp_path):
    path = tmp_path / "table.json"
    choices = tuned()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: table.save(path, choices), range(40)))
    assert table.load(path) == choices
    json.loads(path.read_text())
