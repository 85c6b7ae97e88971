import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dmuon
from dmuon.cli import main
from dmuon.cost import CostModel
from dmuon.orthogonalize import autotune, resolve_coefficients
from dmuon.orthogonalize.autotune import Choice

ORIGINAL = resolve_coefficients("original", 5)


def row(rows: int, columns: int, backend: str = "gram", **changes: object) -> dict[str, object]:
    values = {"dtype": "float32", "batch": 1, "rows": rows, "columns": columns}
    return {**values, "backend": backend, "split": 1, "milliseconds": 1.0, **changes}


def test_tune_prints_the_choices_and_writes_a_table_that_the_optimizer_takes(tmp_path):
    arguments = ["tune", "8x16", "2x8x8", "--cache", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split() == ["dtype", "batch", "rows", "columns", "backend", "split", "ms"]
    assert [line.split()[:4] for line in lines[1:3]] == [
        ["float32", "1", "8", "16"],
        ["float32", "2", "8", "8"],
    ]
    (path,) = tmp_path.glob("*.json")
    weight = nn.Parameter(0.1 * torch.randn(16, 8))
    other = nn.Parameter(weight.detach().clone())
    for parameter, tuning in ((weight, path), (other, None)):
        optimizer = dmuon.Muon([parameter], lr=0.02, tuning=tuning)
        parameter.grad = torch.ones(16, 8).tril()
        optimizer.step()
    torch.testing.assert_close(weight, other, rtol=0, atol=1e-5 * 0.02)


@pytest.mark.parametrize("shape", ["8", "0x4", "8xa", "1x2x3x4"])
def test_tune_refuses_what_is_no_shape(shape):
    result = CliRunner().invoke(main, ["tune", shape])
    assert result.exit_code == 2
    assert shape in result.output


def test_optimizer_follows_the_table_of_its_shapes(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    path.write_text(json.dumps([row(8, 16), row(8, 16, "newton_schulz", batch=4, split=4)]))
    backends = []
    original = autotune.orthogonalize

    def record(x, *, backend="auto", **options):
        backends.append((backend, len(x)))
        return original(x, backend=backend, **options)

    monkeypatch.setattr(autotune, "orthogonalize", record)
    shapes = [(4, 16, 8), (8, 16), (8, 8)]
    for shape in shapes:
        parameter = nn.Parameter(torch.randn(shape))
        parameter.grad = torch.randn(shape)
        dmuon.Muon([parameter], tuning=path).step()
    assert backends == [("newton_schulz", 1)] * 4 + [("gram", 1), ("auto", 1)]


def test_a_table_is_ignored_in_deterministic_mode(tmp_path):
    table = {c.key: c for c in [Choice(**row(4, 8, backend="no such backend"))]}
    torch.use_deterministic_algorithms(True)
    try:
        found = autotune.orthogonalize_tuned(
            torch.eye(4, 8)[None], table, coefficients=ORIGINAL, eps=1e-7, dtype=torch.float32
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.shape == (1, 4, 8)


def test_measured_times_stand_in_for_flops():
    rows = [row(4, 8, milliseconds=8.0), row(4, 8, milliseconds=4.0, batch=4), row(8, 8)]
    table = {c.key: c for c in (Choice(**r) for r in rows)}
    seconds = autotune.seconds_per_matrix(table)
    assert seconds == {(4, 8): 8e-3, (8, 8): 1e-3}
    model = CostModel(seconds)
    assert model.cost((8, 4), 5) == 8e-3
    # Twice the columns of a measured shape: from FLOPs, at the mean measured rate.
    flops = {(4, 8): 5 * (4 * 16 * 8 + 2 * 64), (8, 8): 5 * (4 * 64 * 8 + 2 * 512)}
    rate = 9e-3 / sum(flops.values())
    assert model.cost((8, 16), 5) == pytest.approx(5 * (4 * 64 * 16 + 2 * 512) * rate)


def test_a_table_that_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("[{")
    with pytest.raises(ValueError, match=r"table\.json.*dmuon tune"):
        dmuon.Muon([nn.Parameter(torch.eye(2))], tuning=path)


def step_with_table(paths: list[str]) -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
    optimizer = dmuon.Muon([("w", weight)], tuning=paths[dist.get_rank()])
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    return str(raised.value)


def test_ranks_with_different_tables_are_told(run_ranks, tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    paths[0].write_text(json.dumps([row(4, 8)]))
    paths[1].write_text(json.dumps([row(4, 8, "newton_schulz")]))
    for message in run_ranks(2, step_with_table, [str(path) for path in paths]):
        assert "w" in message
        assert "tuning" in message
