"""Nothing is under way when a step has returned: a process may end there."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import rank_pool

WORKER = Path(rank_pool.__file__).with_name("exit_worker.py")
NUM_RUNS = 6


@pytest.mark.timeout(240)
def test_a_job_that_ends_right_after_a_step_does_not_abort(tmp_path):
    # 15 of 39 runs aborted in gloo, while Python was finalizing.
    command = [sys.executable, str(WORKER), str(tmp_path), str(NUM_RUNS)]
    job = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert job.stdout.splitlines() == ["[0, 0, 0, 0]"] * NUM_RUNS, job.stderr
