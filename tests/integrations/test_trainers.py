"""Each example trains under its real library, resumes bit for bit, and equals one process.

Two ranks train for six steps with a checkpoint after the third, then a fresh process state resumes
from the checkpoint. The one process that the result is compared with sees the same batches whole.
"""

import contextlib
import importlib
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dmuon
from examples.trainers import tiny
from examples.trainers.tiny import full_weights
from tests.support.launch import needs, recorded_optimizers, torchrun_environment

LR = 3e-3
# The first use imports the library in every rank.
TIMEOUT_S = 120
pytestmark = [
    pytest.mark.timeout(TIMEOUT_S + 30),
    # Libraries warn of their own deprecations.
    pytest.mark.filterwarnings("ignore"),
]


def constant(step):
    return 1.0


def in_order(epoch):
    return torch.arange(len(tiny.dataset()))


def one_process(*, factor=constant, order=in_order, lr=LR, **options):
    """Weights after six steps of a plain loop without ranks."""
    model = tiny.make_model()
    optimizer = dmuon.Muon(
        dmuon.param_groups(model), lr=lr, adjust_lr_fn="match_rms_adamw", **options
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(6):
        epoch, batch = divmod(step, tiny.NUM_BATCHES)
        rows = order(epoch)[batch * tiny.BATCH_SIZE :][: tiny.BATCH_SIZE]
        model(tiny.dataset()[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return full_weights(model)


def run_example(name, folder, how=contextlib.nullcontext, **options):
    """Weights of an uninterrupted run, and of one resumed from its checkpoint."""
    with torchrun_environment(), how():
        example = importlib.import_module(f"examples.trainers.{name}")
        # A library may take longer to import on one rank than a collective may wait.
        dist.monitored_barrier(timeout=timedelta(seconds=TIMEOUT_S))
        with recorded_optimizers() as optimizers:
            whole = full_weights(example.train(Path(folder), **options))
            resumed = full_weights(example.train(Path(folder), resume=True, **options))
        assert len(optimizers) == 2
        assert all(optimizer.stats.ns_matrices for optimizer in optimizers)
        return whole, resumed, optimizers[0].stats.ns_matrices


def check(ranks, expected=None, *, num_matrices=4, tolerance=1e-3 * LR):
    """Every rank resumed exactly, they agree, and the weights are those expected."""
    for whole, resumed, _ in ranks:
        for name, weight in whole.items():
            assert torch.equal(weight, resumed[name]), name
            assert torch.equal(weight, ranks[0][0][name]), name
            if expected is not None:
                assert (weight - expected[name]).abs().max().item() <= tolerance, name
    assert sum(count for *_, count in ranks) == num_matrices


def test_plain_loop(run_ranks, tmp_path):
    ranks = run_ranks(2, run_example, "plain_loop", str(tmp_path), timeout=TIMEOUT_S)
    check(ranks, one_process(factor=lambda step: 1 - 0.9 * step / 6))


@contextlib.contextmanager
def accelerate_on_cpu_ranks():
    """Make accelerate take these CPU ranks for GPUs: on CPUs it ignores a plugin for FSDP2."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    def backend(self, cpu, sagemaker, given=None):
        return "gloo", DistributedType.MULTI_GPU

    AcceleratorState._reset_state(reset_partial_state=True)
    with (
        mock.patch.object(PartialState, "_prepare_backend", backend),
        mock.patch.dict("os.environ", {"ACCELERATE_TORCH_DEVICE": "cpu"}),
    ):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


@needs("accelerate")
def test_accelerate_with_fsdp2(run_ranks, tmp_path):
    how = accelerate_on_cpu_ranks
    ranks = run_ranks(2, run_example, "accelerate_fsdp2", str(tmp_path), how, timeout=TIMEOUT_S)
    check(ranks, one_process())


def run_transformers(folder, fsdp):
    how = accelerate_on_cpu_ranks if fsdp else contextlib.nullcontext
    return run_example("transformers_trainer", folder, how, fsdp=fsdp)


@needs("transformers")
def test_transformers_trainer_with_ddp_and_fsdp2(run_ranks, tmp_path):
    runs = [
        run_ranks(2, run_transformers, str(tmp_path / str(fsdp)), fsdp, timeout=TIMEOUT_S)
        for fsdp in (False, True)
    ]
    ddp = runs[0][0][0]
    for ranks in runs:
        check(ranks, ddp, num_matrices=14)


def shuffled(epoch):
    """The order of `torch.utils.data.DistributedSampler`, which Lightning inserts."""
    return torch.randperm(24, generator=torch.Generator().manual_seed(epoch))


@needs("lightning")
def test_lightning_trainer(run_ranks, tmp_path):
    ranks = run_ranks(2, run_example, "lightning_trainer", str(tmp_path), timeout=TIMEOUT_S)
    check(ranks, one_process(order=shuffled))


def warmup_and_decay(step):
    """torchtitan's schedule for `warmup_steps=2` and 6 steps."""
    return [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0][step]


@needs("torchtitan")
def test_torchtitan_container(run_ranks, tmp_path):
    ranks = run_ranks(2, run_example, "torchtitan_container", str(tmp_path), timeout=TIMEOUT_S)
    expected = one_process(factor=warmup_and_decay, lr=8e-4, betas=(0.9, 0.95))
    check(ranks, expected, tolerance=1e-3 * 8e-4)
