"""A small model, its optimizer and its training loop in one process."""

import torch
from torch import nn

import dmuon

MUON_LR, ADAMW_LR = 2e-2, 1e-5


def tiny_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def optimizer_of(model, *, muon_lr=MUON_LR, adamw_lr=ADAMW_LR, **options):
    named = [*model.named_parameters()]
    groups = [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "lr": muon_lr},
        {"params": [(n, p) for n, p in named if p.ndim == 1], "algorithm": "adamw", "lr": adamw_lr},
    ]
    return dmuon.Muon(groups, **options)


def set_grads(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def train(model, optimizer, steps):
    for step in steps:
        set_grads(model, step)
        optimizer.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
