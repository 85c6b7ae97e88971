import json
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dmuon
from dmuon.cli import main
from dmuon.newton_schulz import Method, resolve_coefficients
from dmuon.step import bucket
from dmuon.tuning import measure
from dmuon.tuning.table import VERSION, format_timings, load, save


def write_table(path, *rows):
    path.write_text(json.dumps({"version": VERSION, "choices": rows}))


def row(
    rows: int, columns: int, backend: str = "gram+dense", **changes: object
) -> dict[str, object]:
    values = {"dtype": "float32", "batch": 1, "rows": rows, "columns": columns}
    values |= {"steps": 5, "backend": backend, "parts": 1, "milliseconds": 1.0}
    return {**values, **changes}


def test_tune_prints_the_choices_and_writes_a_table_that_the_optimizer_takes(tmp_path):
    path = tmp_path / "new" / "table.json"
    result = CliRunner().invoke(main, ["tune", "16x8", "2x8x8", "--output", str(path)])
    assert result.exit_code == 0, result.output
    timings = load(path)
    assert format_timings(timings) in result.output
    assert {choice.key[1:4] for choice in timings.choices} == {(1, 8, 16), (2, 8, 8)}
    # A second call adds to the file.
    assert CliRunner().invoke(main, ["tune", "4x4", "--output", str(path)]).exit_code == 0
    assert set(timings.choices) < set(load(path).choices)
    weight = nn.Parameter(0.1 * torch.randn(16, 8))
    other = nn.Parameter(weight.detach().clone())
    for parameter, tuning in ((weight, path), (other, None)):
        optimizer = dmuon.Muon([parameter], lr=0.02, tuning=tuning)
        parameter.grad = torch.ones(16, 8).tril()
        optimizer.step()
    torch.testing.assert_close(weight, other, rtol=0, atol=1e-5 * 0.02)


MODULE = """
import torch
import dmuon

def optimizer():
    return dmuon.Muon([torch.nn.Parameter(torch.randn(4, 8))])

def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))

def number():
    return 7
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "made_for_dmuon.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield "made_for_dmuon"
    sys.modules.pop("made_for_dmuon", None)
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("function", ["optimizer", "model"])
def test_tune_takes_the_batches_of_an_optimizer_or_a_model(function, module, tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    seen = []

    def tune(optimizer, where):
        seen.extend(group["use_muon"] for group in optimizer.param_groups)
        kind = measure.BatchKind(
            Method(resolve_coefficients("original"), 1e-7, torch.float32), 1, (4, 8)
        )
        found = measure.measure([kind], torch.device("cpu"))
        save(where, found)
        return found

    monkeypatch.setattr(dmuon.Muon, "tune", tune, raising=False)
    result = CliRunner().invoke(main, ["tune", f"{module}:{function}", "--output", str(path)])
    assert result.exit_code == 0, result.output
    assert format_timings(load(path)) in result.output
    assert True in seen


@pytest.mark.parametrize(
    "what", [["no_such_module:f"], ["{}:no_such_name"], ["{}:number"], ["{}:model", "4x8"]]
)
def test_tune_refuses_what_makes_no_optimizer(what, module):
    result = CliRunner().invoke(main, ["tune", *(word.format(module) for word in what)])
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--steps", "0"),
        ("--coefficients", "jordan"),
        ("--device", "gpu"),
        ("--device", "cuda:99"),
        ("--device", "hpu"),
        ("--dtype", "int8"),
    ],
)
def test_tune_refuses_what_it_does_not_know(option, value, tmp_path):
    arguments = ["tune", "4x8", option, value, "--output", str(tmp_path / "table.json")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    assert not list(tmp_path.iterdir())


def test_tune_refuses_an_output_that_it_cannot_add_to(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    for output in (path, path / "table.json"):
        result = CliRunner().invoke(main, ["tune", "4x8", "--output", str(output)])
        assert result.exit_code == 2, result.output
    assert path.read_text() == ""


def test_tune_fails_when_no_backend_is_right(tmp_path, monkeypatch):
    monkeypatch.setitem(measure._TOLERANCES, torch.float32, -1.0)
    path = tmp_path / "table.json"
    result = CliRunner().invoke(main, ["tune", "8x4", "--output", str(path)])
    assert result.exit_code == 1
    assert "1 x 4 x 8" in result.output.splitlines()[-1]
    assert not path.exists()


@pytest.mark.parametrize("shape", ["8", f"{'9' * 20}x3", "0x4", "8xa", "1x2x3x4", "²x3"])
def test_tune_refuses_what_is_no_shape(shape):
    result = CliRunner().invoke(main, ["tune", shape])
    assert result.exit_code == 2
    assert shape in result.output


def test_optimizer_follows_the_table_of_its_shapes(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    write_table(path, row(8, 16), row(8, 16, "newton_schulz+blocks", batch=4))
    backends = []
    original = bucket.orthogonalize_stack

    def record(stack, method, backend, parts):
        backends.append((str(backend), len(stack)))
        return original(stack, method, backend, parts)

    monkeypatch.setattr(bucket, "orthogonalize_stack", record)
    for shape in [(4, 16, 8), (8, 16), (8, 8)]:
        parameter = nn.Parameter(torch.randn(shape))
        parameter.grad = torch.randn(shape)
        dmuon.Muon([parameter], tuning=path).step()
    assert backends == [
        ("newton_schulz+blocks", 4),
        ("gram+dense", 1),
        ("newton_schulz+dense", 1),
    ]


def test_owners_are_balanced_by_the_measured_times(tmp_path):
    path = tmp_path / "table.json"
    # By FLOPs the longer matrix costs more, by these times less.
    write_table(path, row(8, 16, milliseconds=1.0), row(8, 8, milliseconds=3.0))
    params = [nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(8, 8))]
    for deterministic, expected in ((False, 3.0), (True, 15360 / 25600)):
        torch.use_deterministic_algorithms(deterministic)
        try:
            optimizer = dmuon.Muon(params, tuning=path)
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        finally:
            torch.use_deterministic_algorithms(False)
        assignments = optimizer._stepper._planned.plan.assignments
        costs = {a.request.matrix.shape: a.cost for a in assignments}
        assert costs[8, 8] / costs[8, 16] == pytest.approx(expected)


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
    write_table(paths[0], row(4, 8))
    write_table(paths[1], row(4, 8, "newton_schulz+dense"))
    for message in run_ranks(2, step_with_table, [str(path) for path in paths]):
        assert "w" in message
        assert "tuning" in message


def step_padded(path: str) -> tuple[list[tuple[int, ...]], float]:
    """Two ranks step with and without a table: stacks of the first, largest difference."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    shapes = [(6, 9), (9, 6), (9, 7), (12, 8)]
    sizes: list[tuple[int, ...]] = []
    original = bucket.orthogonalize_stack

    def counted(stack, *arguments):
        sizes.append(tuple(stack.shape))
        return original(stack, *arguments)

    weights = []
    bucket.orthogonalize_stack = counted
    try:
        for tuning in (path, None):
            generator = torch.Generator().manual_seed(0)
            named = []
            for i, shape in enumerate(shapes):
                whole = torch.randn(2, *shape, generator=generator)
                weight = nn.Parameter(distribute_tensor(whole[0], mesh, [Shard(0)]))
                weight.grad = distribute_tensor(whole[1], mesh, [Shard(0)])
                named.append((f"w{i}", weight))
            dmuon.Muon(named, lr=0.02, tuning=tuning).step()
            weights.append([weight.to_local().detach().clone() for _, weight in named])
            if tuning:
                seen = list(sizes)
    finally:
        bucket.orthogonalize_stack = original
    error = max((a - b).abs().max().item() for a, b in zip(*weights, strict=True))
    gathered = [None, None]
    dist.all_gather_object(gathered, seen)
    return [size for sizes in gathered for size in sizes], error


def test_near_shapes_are_padded_where_the_table_says_that_it_is_faster(run_ranks, tmp_path):
    path = tmp_path / "table.json"
    # A call takes 10 ms, a matrix 1 ms more.
    rows = [
        row(*shape, "newton_schulz+dense", batch=batch, milliseconds=10.0 + batch)
        for shape in [(6, 9), (7, 9), (8, 12)]
        for batch in (1, 4)
    ]
    write_table(path, *rows)
    for sizes, error in run_ranks(2, step_padded, str(path)):
        # Each owner makes one call for all its matrices, although no two ranks share a shape.
        assert len(sizes) == 2
        assert sum(size[0] for size in sizes) == 4
        assert error <= 1e-5 * 0.02
