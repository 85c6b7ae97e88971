"""`optimizer.report()`: every parameter, and totals for the job."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dmuon


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(11, 6)
        self.qkv = nn.Linear(6, 12, bias=False)
        self.mlp = nn.Linear(6, 6)
        self.experts = nn.Parameter(torch.zeros(3, 4, 6))


def tiny_groups(**options):
    return dmuon.param_groups(Tiny(), split={"qkv": (6, 4, 2)}, **options)


def test_report_has_a_row_for_every_parameter():
    rows = {row.parameter: row for row in dmuon.Muon(tiny_groups()).report().rows}
    assert set(rows) == {name for name, _ in Tiny().named_parameters()}
    assert {name: row.algorithm for name, row in rows.items()} == {
        "tok.weight": "adamw",
        "qkv.weight": "muon",
        "mlp.weight": "muon",
        "mlp.bias": "adamw",
        "experts": "muon",
    }
    assert rows["tok.weight"].rule == "embedding"
    assert (rows["experts"].matrices, rows["experts"].shape) == ("3 of 4x6", "3x4x6")
    assert rows["qkv.weight"].matrices == "1 of 6x6, 1 of 4x6, 1 of 2x6"
    assert rows["tok.weight"].matrices == rows["tok.weight"].owners == ""
    assert rows["qkv.weight"].owners == "0 (3)"
    assert {row.layout for row in rows.values()} == {"plain"}


def test_lr_scale_is_that_of_every_block():
    options = {"adjust_lr_fn": "match_rms_adamw"}
    rows = {
        row.parameter: row
        for row in dmuon.Muon(
            [
                {"params": [("w", nn.Parameter(torch.zeros(20, 4)))], "split": (16, 4)} | options,
                {"params": [("b", nn.Parameter(torch.zeros(4)))], "use_muon": False},
            ]
        )
        .report()
        .rows
    }
    assert rows["w"].lr_scale == "0.8, 0.4"
    assert rows["b"].lr_scale == "1"


def test_totals_count_matrices_and_sum_to_one():
    report = dmuon.Muon(tiny_groups()).report()
    assert report.num_matrices == 3 + 1 + 3
    assert report.loads == {0: 1.0}
    assert report.bytes_sent == {0: 0}


def test_report_without_muon_parameters_is_a_table_too():
    report = dmuon.Muon([{"params": [torch.zeros(4)], "use_muon": False}]).report()
    assert (report.num_matrices, report.loads, report.bytes_sent) == (0, {}, {})
    assert "adamw" in str(report)


def test_report_reads_as_a_table_with_aligned_columns():
    report = dmuon.Muon(tiny_groups()).report()
    header, rule, *lines = str(report).splitlines()
    columns = "parameter shape layout algorithm rule matrices owners lr scale"
    assert " ".join(header.split()) == columns
    assert set(rule) == {"-", " "}
    for row, line in zip(report.rows, lines, strict=False):
        assert line.startswith(row.parameter)
        assert line[header.index("algorithm") :].startswith(row.algorithm)
        assert line[header.index("rule") :].startswith(row.rule)
    assert f"{report.num_matrices} matrices" in str(report)


def test_report_of_a_sharded_parameter_shows_its_layout_owners_and_bytes(fake_world):
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2))
        tensors = [
            distribute_tensor(torch.zeros(6, 4), mesh, [Replicate(), Shard(0)], src_data_rank=None)
            for _ in range(4)
        ]
        optimizer = dmuon.Muon([(f"p{i}", nn.Parameter(t)) for i, t in enumerate(tensors)])
        report = optimizer.report()
    assert [row.layout for row in report.rows] == ["(R, S(0)) on 2x2"] * 4
    assert {row.shape for row in report.rows} == {"6x4"}
    assert sorted(row.owners for row in report.rows) == [f"{rank} (1)" for rank in range(4)]
    assert report.loads == dict.fromkeys(range(4), 0.25)
    # Each owner sends three ranks their 3 x 4 pieces, and its own half to the replica's owner.
    assert report.bytes_sent == dict.fromkeys(range(4), (3 + 1) * 3 * 4 * 4)


def test_report_can_be_read_before_and_after_a_step():
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = dmuon.Muon([weight])
    before = optimizer.report()
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    assert optimizer.report() == before
    assert optimizer.stats.ns_matrices == before.num_matrices


@pytest.mark.parametrize("flatten", [False, True])
def test_stack_or_kernel_is_what_the_group_says(flatten):
    weight = nn.Parameter(torch.zeros(4, 6, 3))
    (row,) = dmuon.Muon([{"params": [weight], "flatten": flatten}]).report().rows
    assert row.matrices == ("1 of 4x18" if flatten else "4 of 6x3")


def test_report_describes_parameters_replaced_before_the_first_step():
    optimizer = dmuon.Muon([("w", nn.Parameter(torch.ones(6, 4)))])
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(4, 6))
    assert optimizer.report().rows[0].matrices == "1 of 4x6"
