"""The demo and the documents that a newcomer runs first."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.data import batch
from examples.model import Llama, LlamaConfig

ROOT = Path(__file__).parents[1]
TINY = LlamaConfig(vocab_size=256, dim=16, hidden_dim=24, num_layers=2, num_heads=2)
DOCUMENTS = ("README.md", "docs/quickstart.md")


def test_batches_depend_on_seed_step_and_rank_alone():
    inputs, targets = batch(0, 3, 1, batch_size=2, context=16)
    again, _ = batch(0, 3, 1, batch_size=2, context=16)
    assert inputs.shape == targets.shape == (2, 16)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for other in ((1, 3, 1), (0, 4, 1), (0, 3, 0)):
        assert not torch.equal(inputs, batch(*other, batch_size=2, context=16)[0])


def test_model_starts_uniform_and_every_parameter_has_a_gradient():
    torch.manual_seed(0)
    model = Llama(TINY)
    loss = model(*batch(0, 0, 0, batch_size=2, context=16))
    loss.backward()
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_model_does_not_see_the_future():
    torch.manual_seed(0)
    model = Llama(TINY)
    tokens, _ = batch(0, 0, 0, batch_size=1, context=16)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    ignored = torch.full_like(tokens, -100)
    ignored[:, 7] = 65
    assert torch.equal(model(tokens, ignored), model(changed, ignored))


@pytest.mark.timeout(120)
def test_demo_trains_compares_and_draws(tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(ROOT / "examples" / "train.py"), "--smoke", "--out", str(tmp_path)),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all-gather Muon" in done.stdout
    assert "loss of vanilla and dmuon" in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")

    runs = {run["name"]: run for run in json.loads((tmp_path / "demo.json").read_text())["runs"]}
    num_matrices = 2 * 7
    assert runs["adamw"]["ns_matrices"] == 0
    assert runs["vanilla"]["ns_matrices"] == 2 * num_matrices
    assert runs["dmuon"]["ns_matrices"] == num_matrices
    assert all(run["losses"][-1] < run["losses"][0] for run in runs.values())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_in_documents_runs(document, tmp_path, monkeypatch):
    text = (ROOT / document).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    # What the text says the reader has: a model and batches.
    names = {
        "model": Llama(TINY),
        "batches": [batch(0, step, 0, batch_size=2, context=16) for step in range(3)],
    }
    for block in blocks:
        exec(compile(block, document, "exec"), names)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_documents_exist(document):
    targets = set(re.findall(r"^make (\w+)", (ROOT / document).read_text(), flags=re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_included_snippets_exist(page):
    for path, name in re.findall(r'--8<-- "([^":]+):([\w-]+)"', page.read_text()):
        assert f"--8<-- [start:{name}]" in (ROOT / path).read_text(), (path, name)
