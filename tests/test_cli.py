import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dmuon
from dmuon.cli import main
from dmuon.newton_schulz import resolve_coefficients
from dmuon.tuning import autotune, batches
from dmuon.tuning.table import CACHE_VERSION, Choice, Table

ORIGINAL = resolve_coefficients("original", 5)


def write_table(path, *rows):
    path.write_text(json.dumps({"version": CACHE_VERSION, "choices": rows}))


def row(rows: int, columns: int, backend: str = "gram", **changes: object) -> dict[str, object]:
    values = {"dtype": "float32", "batch": 1, "rows": rows, "columns": columns}
    values |= {"steps": 5, "backend": backend, "split": 1, "milliseconds": 1.0}
    return {**values, **changes}


def test_tune_prints_the_choices_and_writes_a_table_that_the_optimizer_takes(tmp_path):
    arguments = ["tune", "8x16", "2x8x8", "--cache", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split()[:5] == ["dtype", "batch", "rows", "columns", "steps"]
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
    arguments = ["tune", "4x8", option, value, "--cache", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    assert not list(tmp_path.iterdir())


def test_tune_refuses_a_cache_that_is_no_folder(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    result = CliRunner().invoke(main, ["tune", "4x8", "--cache", str(path)])
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize("failing", ["8x4", "all"])
def test_tune_fails_when_no_backend_is_right(failing, tmp_path, monkeypatch):
    def is_right(found, x, coefficients):
        return failing != "all" and x.shape[-2:] != (4, 8)

    monkeypatch.setattr(autotune, "_is_right", is_right)
    result = CliRunner().invoke(main, ["tune", "8x4", "8x8", "--cache", str(tmp_path)])
    assert result.exit_code == 1
    assert "8x4" in result.output.splitlines()[-1]
    assert len(list(tmp_path.iterdir())) == (failing != "all")


@pytest.mark.parametrize("shape", ["8", f"{'9' * 20}x3", "0x4", "8xa", "1x2x3x4", "²x3"])
def test_tune_refuses_what_is_no_shape(shape):
    result = CliRunner().invoke(main, ["tune", shape])
    assert result.exit_code == 2
    assert shape in result.output


def test_optimizer_follows_the_table_of_its_shapes(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    write_table(path, row(8, 16), row(8, 16, "newton_schulz", batch=4, split=4))
    backends = []
    original = batches.orthogonalize

    def record(x, *, backend="auto", **options):
        backends.append((backend, len(x)))
        return original(x, backend=backend, **options)

    monkeypatch.setattr(batches, "orthogonalize", record)
    shapes = [(4, 16, 8), (8, 16), (8, 8)]
    for shape in shapes:
        parameter = nn.Parameter(torch.randn(shape))
        parameter.grad = torch.randn(shape)
        dmuon.Muon([parameter], tuning=path).step()
    assert backends == [("newton_schulz", 1)] * 4 + [("gram", 1), ("auto", 1)]


@pytest.mark.parametrize("backend", ["gram_triton", "gram_quack", "gram"])
def test_a_choice_that_cannot_run_here_goes_to_auto(backend):
    # Too long to have known restarts in half precision.
    long = resolve_coefficients("original", 20)
    table = Table([Choice(**row(4, 32, backend, dtype="bfloat16"))])
    x = torch.randn(1, 4, 32)
    options = {"coefficients": long, "eps": 1e-7, "dtype": torch.bfloat16}
    found = batches.orthogonalize_tuned(x, table, **options)
    assert torch.equal(found, batches.orthogonalize(x, **options))


def test_a_table_is_ignored_in_deterministic_mode(tmp_path):
    table = Table([Choice(**row(4, 8, backend="no such backend"))])
    torch.use_deterministic_algorithms(True)
    try:
        found = batches.orthogonalize_tuned(
            torch.eye(4, 8)[None], table, coefficients=ORIGINAL, eps=1e-7, dtype=torch.float32
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.shape == (1, 4, 8)


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
        assignments = optimizer._plan().plan.assignments
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
    write_table(paths[1], row(4, 8, "newton_schulz"))
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
    original = batches.orthogonalize

    def counted(x, **options):
        sizes.append(tuple(x.shape))
        return original(x, **options)

    weights = []
    batches.orthogonalize = counted
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
        batches.orthogonalize = original
    error = max((a - b).abs().max().item() for a, b in zip(*weights, strict=True))
    gathered = [None, None]
    dist.all_gather_object(gathered, seen)
    return [size for sizes in gathered for size in sizes], error


def test_near_shapes_are_padded_where_the_table_says_that_it_is_faster(run_ranks, tmp_path):
    path = tmp_path / "table.json"
    # A call takes 10 ms, a matrix 1 ms more.
    rows = [
        row(*shape, "newton_schulz", batch=batch, milliseconds=10.0 + batch)
        for shape in [(6, 9), (7, 9), (8, 12)]
        for batch in (1, 4)
    ]
    write_table(path, *rows)
    for sizes, error in run_ranks(2, step_padded, str(path)):
        # Each owner makes one call for all its matrices, although no two ranks share a shape.
        assert len(sizes) == 2
        assert sum(size[0] for size in sizes) == 4
        assert error <= 1e-5 * 0.02
