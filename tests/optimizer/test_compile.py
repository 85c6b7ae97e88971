"""The optimizer beside `torch.compile`."""

import torch
from torch import nn
from torch.optim.lr_scheduler import (
    LambdaLR,
)

import dmuon
from tests.support.loops import optimizer_of, same_bits, set_grads, tiny_model, train, weights


def test_a_compiled_model_trains_as_an_eager_one_and_does_not_recompile():
    torch._dynamo.reset()
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    results = []
    for compiled in (False, True):
        model = tiny_model()
        forward = torch.compile(model, backend=backend) if compiled else model
        optimizer = dmuon.Muon(dmuon.param_groups(forward, muon=["*"]), lr=0.02)
        scheduler = LambdaLR(optimizer, lambda t: 1 / (1 + t))
        for step in range(5):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            forward(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        results.append(weights(model))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert len(compilations) == 1


def test_a_compiled_step_runs_eagerly_and_gives_the_same_weights():
    # torch.compile(optimizer.step) spent minutes on tracing the planner.
    torch._dynamo.reset()
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    model, reference = tiny_model(), tiny_model()
    optimizer, expected = optimizer_of(model), optimizer_of(reference)
    step = torch.compile(optimizer.step, backend=backend)
    for i in range(3):
        set_grads(model, i)
        step()
        train(reference, expected, [i])
    assert same_bits(weights(model), weights(reference))
    assert compilations == []


def test_a_compiled_closure_stays_compiled():
    torch._dynamo.reset()
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    model = tiny_model()
    forward = torch.compile(model, backend=backend)
    optimizer = optimizer_of(model)

    def closure():
        optimizer.zero_grad()
        loss = forward(torch.ones(4, 6)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure)
    assert len(compilations) == 1


def test_r68_twelve_shapes_compile_at_most_once_each_and_never_again():
    # More shapes than torch.compile would recompile for by default.
    counters = torch._dynamo.utils.counters
    counters.clear()
    params = [nn.Parameter(torch.randn(3 + i, 20 - i)) for i in range(12)]
    optimizer = dmuon.Muon(params, lr=0.02)
    num_graphs = []
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        for p in params:
            p.grad = torch.randn(p.shape)
        optimizer.step()
        assert optimizer.stats.ns_matrices == 12
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] <= 12
    assert set(num_graphs) == {num_graphs[0]}
