"""A job on which one rank or all do what they should not, between two good steps."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dmuon
from tests.support.parity import full_tensor, seeded

LR = 0.02
SHAPES = {"wide": (6, 8), "tall": (7, 5), "copy": (4, 6), "frozen": (6, 4), "bias": (9,)}
# Far below the 20 s for which a collective waits: nobody waited for one.
AT_ONCE_S = 8.0


@dataclass
class Job:
    """Sharded and replicated matrices, a frozen one and a vector, in three groups.

    On one process (`mesh` is None) everything is whole.
    """

    params: dict[str, nn.Parameter]
    optimizer: dmuon.Muon
    mesh: object

    @classmethod
    def make(cls, *, distributed=True, **options):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if distributed else None
        if distributed:
            options = {"process_group": dist.group.WORLD, **options}
        params = {name: cls.parameter(name, mesh) for name in SHAPES}
        params["frozen"].requires_grad_(False)
        named = [(name, params[name]) for name in SHAPES]
        groups = [
            {"params": named[:2], "momentum": 0.9},
            {"params": named[2:4], "nesterov": False},
            {"params": named[4:], "algorithm": "adamw", "lr": 0.01},
        ]
        return cls(params, dmuon.Muon(groups, lr=LR, **options), mesh)

    @staticmethod
    def parameter(name, mesh, shape=None):
        value = seeded(shape or SHAPES[name], len(name))
        is_plain = mesh is None or name == "copy"
        return nn.Parameter(value if is_plain else lay_out(value, mesh))

    def set_grads(self, step, names=None):
        for i, (name, p) in enumerate(self.params.items()):
            wanted = (names is None or name in names) and p.requires_grad
            grad = seeded(tuple(p.shape), step, i).to(p.dtype)
            p.grad = laid_out_like(grad, p) if wanted else None

    def whole(self):
        return {name: full_tensor(p).clone() for name, p in self.params.items()}

    def numbers(self):
        """Every local number that a step may change."""
        found = {}
        for name, p in self.params.items():
            tensors = {"": p, **self.optimizer.state.get(p, {})}
            found |= {f"{name} {k}": local(t).detach().clone() for k, t in tensors.items()}
        return found


def lay_out(value, mesh, placements=(Shard(0),)):
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def laid_out_like(value, p):
    return lay_out(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(a, b):
    """Whether all numbers of `a`, by name, are those of `b`, which may have more."""
    return all(torch.equal(x, b[key]) for key, x in a.items())


def refused(job, call=None):
    """What a step raises at once, having changed nothing: the error's type and text."""
    before, start = job.numbers(), time.monotonic()
    try:
        (call or job.optimizer.step)()
    except Exception as error:
        found = type(error).__name__, str(error)
    else:
        return None
    assert time.monotonic() - start < AT_ONCE_S, f"it waited: {found}"
    assert same(before, job.numbers()), f"something was changed: {found}"
    return found


def refused_by_all(job, call=None):
    """The one text that all ranks raise; checks that they do, and with one type."""
    mine = refused(job, call)
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    assert answers[0] is not None, answers
    assert answers == answers[:1] * len(answers), answers
    return mine[1]


def assert_near(a, b, tolerance=1e-5):
    for name, x in a.items():
        torch.testing.assert_close(
            x, b[name], rtol=0, atol=tolerance * LR, msg=lambda text, name=name: f"{name}: {text}"
        )
