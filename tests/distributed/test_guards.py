"""What is unusual but right is not refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from tests.support.faults import LR, Job, assert_near, same
from tests.support.parity import full_tensor, seeded


def train_one_half(half):
    """Steps in which only some parameters have a gradient, after one in which all had."""
    job, alone = Job.make(), Job.make(distributed=False)
    for step, names in enumerate([None, half, half, None]):
        before = job.numbers()
        for each in (job, alone):
            each.set_grads(step, names)
            each.optimizer.step()
        untouched = [key for key in before if names and key.split()[0] not in names]
        assert same({key: before[key] for key in untouched}, job.numbers())
        assert_near(job.whole(), alone.whole())


@pytest.mark.parametrize("half", [{"bias"}, {"copy"}, {"tall"}], ids=str)
def test_a_step_may_train_a_part_once_all_has_been_trained(run_ranks, half):
    # A batch without images for the vision tower was an error.
    run_ranks(2, train_one_half, half)


class Experts(nn.Module):
    """A stack without any rows, as a rank without experts of one kind has it, beside a matrix."""

    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.empty(4, 0, 8))
        self.some = nn.Parameter(seeded((5, 3), 1))


def train_without_elements(algorithm):
    model, whole = fully_shard(Experts(), mesh=init_device_mesh("cpu", (2,))), Experts()
    optimizers = [
        dmuon.Muon(each.named_parameters(), lr=LR, algorithm=algorithm) for each in (model, whole)
    ]
    for step in range(2):
        grad = seeded((5, 3), step)
        whole.some.grad, whole.none.grad = grad, torch.zeros(4, 0, 8)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        rows = grad.tensor_split([3])[dist.get_rank()]
        model.some.grad.to_local().copy_(rows)
        for optimizer in optimizers:
            optimizer.step()
    state = optimizers[0].state_dict()
    optimizers[0].load_state_dict(state)
    assert_near({"some": full_tensor(model.some)}, {"some": whole.some.detach()})


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamw"])
def test_a_stack_without_elements_trains_under_fully_shard(run_ranks, algorithm):
    # It was refused, with the advice to use `fully_shard`.
    run_ranks(2, train_without_elements, algorithm)
