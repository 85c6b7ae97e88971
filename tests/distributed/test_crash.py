"""A rank is killed, twice; the job restarts by itself and loses nothing but time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import crash_worker

WORKER = Path(crash_worker.__file__)


def launch(folder, num_ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", "--max-restarts=3", str(WORKER), str(folder)]
    # By default torchrun 2.13 hands one store to all lives, with the addresses of the dead in it.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(240)
def test_a_killed_job_resumes_and_ends_with_the_same_bits(run_ranks, tmp_path, capsys):
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    uninterrupted.mkdir()
    killed.mkdir()
    expected = run_ranks(2, crash_worker.train, uninterrupted)[0]

    job = launch(killed)
    assert job.returncode == 0, job.stderr
    survivor, victim = (
        [json.loads(line) for line in (killed / f"rank-{rank}.jsonl").read_text().splitlines()]
        for rank in range(2)
    )
    kills = [event for event in victim if event["event"].startswith("killed")]
    raised = [event for event in survivor if event["event"] == "raised"]
    resumes = [event for event in survivor if event["event"] == "start" and event["life"]]
    assert [kill["event"] for kill in kills] == ["killed in step", "killed in save"]
    assert len(raised) == len(resumes) == len(kills)
    for kill, after in zip(kills, raised, strict=True):
        assert after["life"] == kill["life"]
        assert after["time"] - kill["time"] < crash_worker.TIMEOUT_S + 1

    done = [
        max(e["step"] for e in victim if e["life"] == k["life"] and e["event"] == "step")
        for k in kills
    ]
    lost = [last + 1 - resume["step"] for last, resume in zip(done, resumes, strict=True)]
    assert all(0 <= steps <= crash_worker.INTERVAL for steps in lost)

    weights = torch.load(killed / "weights.pt")
    assert weights.keys() == expected.keys()
    differences = sum(int((weights[name] != expected[name]).sum()) for name in expected)
    waited = [
        round(after["time"] - kill["time"], 2) for kill, after in zip(kills, raised, strict=True)
    ]
    with capsys.disabled():
        print(
            f"\nkills {len(kills)}, resumes {len(resumes)}, steps lost {lost} of at most "
            f"{crash_worker.INTERVAL}, seconds until the others raised {waited}, "
            f"differences {differences}"
        )
    assert differences == 0
