"""State of other implementations: after adoption the next step is the one that they would take."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import dmuon

LR = 0.02
MUON = ["up.weight", "down.weight"]
ADAMW = ["up.bias", "down.bias"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 3)


def make_model():
    torch.manual_seed(1)
    return Model()


def pick(model, names):
    return [dict(model.named_parameters())[name] for name in names]


def set_grads(model, step):
    """Gradients of very different sizes, so that momentum of a wrong size shows."""
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator) * 10.0 ** (-step)
        param.grad = grad.to(param.dtype)


def make_muon(model, **options):
    options = {"lr": LR, "weight_decay": 0.1, **options}
    return dmuon.Muon(dmuon.param_groups(model), **options)


def scale(shape):
    return max(1.0, shape[0] / shape[1]) ** 0.5


def orthogonalize(x):
    coefficients = [(3.4445, -4.7750, 2.0315)] * 5
    return dmuon.orthogonalize(x, coefficients=coefficients, eps=1e-7)


class Reference(torch.optim.Optimizer):
    """Muon and AdamW as KellerJordan/Muon or microsoft/dion write their state: a few lines each."""

    def __init__(self, params, *, keys, heavy_ball, nesterov, group_step=False):
        super().__init__(params, {"lr": LR, "weight_decay": 0.1})
        self.keys, self.heavy_ball, self.nesterov = keys, heavy_ball, nesterov
        self.group_step = group_step

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                p.mul_(1 - LR * 0.1)
                p.sub_((self.muon if p.ndim == 2 else self.adamw)(p, self.state[p], group["step"]))
            if not self.group_step:
                del group["step"]

    def muon(self, p, state, _):
        (key,) = self.keys["muon"]
        buffer = state.setdefault(key, torch.zeros_like(p))
        buffer.mul_(0.9).add_(p.grad if self.heavy_ball else 0.1 * p.grad)
        update = (
            buffer * 0.9 + p.grad * (1 if self.heavy_ball else 0.1) if self.nesterov else buffer
        )
        return LR * scale(p.shape) * orthogonalize(update)

    def adamw(self, p, state, step):
        first, second, *count = self.keys["adamw"]
        if count:
            state[count[0]] = step = state.get(count[0], 0) + 1
        m = state.setdefault(first, torch.zeros_like(p)).lerp_(p.grad, 0.1)
        v = state.setdefault(second, torch.zeros_like(p)).lerp_(p.grad.square(), 0.05)
        return LR * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)


KELLER = {"muon": ["momentum_buffer"], "adamw": ["exp_avg", "exp_avg_sq", "step"]}
OLD_KELLER = {"muon": ["momentum_buffer"], "adamw": ["moment1", "moment2", "step"]}
DION = {"muon": ["momentum"], "adamw": ["momentum", "variance"]}


def keller(model, *, heavy_ball=False, keys=KELLER):
    groups = [
        {"params": pick(model, MUON), "momentum": 0.9, "use_muon": True},
        {"params": pick(model, ADAMW), "betas": (0.9, 0.95), "eps": 1e-8, "use_muon": False},
    ]
    return Reference(groups, keys=keys, heavy_ball=heavy_ball, nesterov=True)


def dion(model):
    shared = {"mu": 0.9, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "nesterov": False}
    groups = [
        {"params": pick(model, MUON), "algorithm": "muon", "adjust_lr": None, **shared},
        {"params": pick(model, ADAMW), "algorithm": "adamw", "adjust_lr": None, **shared},
    ]
    return Reference(groups, keys=DION, heavy_ball=True, nesterov=False, group_step=True)


SOURCES = {
    "keller": (keller, {"source": "keller"}, {}),
    "old keller": (
        lambda model: keller(model, heavy_ball=True, keys=OLD_KELLER),
        {"source": "keller", "momentum": "heavy_ball"},
        {},
    ),
    "dion": (dion, {"source": "dion"}, {"nesterov": False}),
}


def train_source(name, steps):
    """A model and its optimizer after some steps."""
    model = make_model()
    optimizer = SOURCES[name][0](model)
    for step in range(steps):
        set_grads(model, step)
        optimizer.step()
    return model, optimizer


def difference(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("adopt", [True, False], ids=["adopted", "afresh"])
def test_the_next_step_is_the_one_the_source_would_take(name, adopt):
    _, arguments, options = SOURCES[name]
    theirs, source = train_source(name, 3)
    mine = make_model()
    mine.load_state_dict(theirs.state_dict())
    optimizer = make_muon(mine, momentum=0.9, betas=(0.9, 0.95), **options)
    if adopt:
        report = dmuon.adopt_state(
            optimizer, source.state_dict(), names=[MUON + ADAMW], **arguments
        )
        assert {value.fqn for value in report.adopted} == {*MUON, *ADAMW}
    for model, stepped in ((theirs, source), (mine, optimizer)):
        set_grads(model, 3)
        stepped.step()
    if adopt:
        assert difference(mine, theirs) <= 1e-5 * LR
    else:  # the size of momentum matters here, so the test above would see a wrong factor
        assert difference(mine, theirs) > 1e-2 * LR


def test_a_heavy_ball_taken_for_an_average_would_be_seen():
    theirs, source = train_source("dion", 3)
    mine = make_model()
    mine.load_state_dict(theirs.state_dict())
    optimizer = make_muon(mine, momentum=0.9, betas=(0.9, 0.95), nesterov=False)
    dmuon.adopt_state(
        optimizer, source.state_dict(), source="dion", momentum="ema", names=[MUON + ADAMW]
    )
    for model, stepped in ((theirs, source), (mine, optimizer)):
        set_grads(model, 0)
        stepped.step()
    assert difference(mine, theirs) > 1e-2 * LR


def torch_optimizers(model):
    # --8<-- [start:torch-before]
    hidden = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    rest = [(name, p) for name, p in model.named_parameters() if p.ndim != 2]
    muon = torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1)
    adamw = torch.optim.AdamW(rest, lr=0.02, weight_decay=0.1)
    # --8<-- [end:torch-before]
    return muon, adamw


def test_torch_muon_and_adamw_continue():
    theirs = make_model()
    muon, adamw = torch_optimizers(theirs)
    for step in range(3):
        set_grads(theirs, step)
        muon.step()
        adamw.step()
    saved = {"muon": muon.state_dict(), "adamw": adamw.state_dict()}
    model = make_model()
    model.load_state_dict(theirs.state_dict())
    # --8<-- [start:torch-after]
    optimizer = dmuon.Muon(dmuon.param_groups(model), lr=0.02, weight_decay=0.1)
    report = dmuon.adopt_state(optimizer, [saved["muon"], saved["adamw"]], source="torch")
    print(report)
    # --8<-- [end:torch-after]
    for param_group in optimizer.param_groups:
        param_group["ns_dtype"] = torch.bfloat16  # as torch.optim.Muon, everywhere
    set_grads(theirs, 3)
    set_grads(model, 3)
    muon.step()
    adamw.step()
    optimizer.step()
    for name, mine in model.named_parameters():
        other = dict(theirs.named_parameters())[name]
        tolerance = 0.1 * LR * scale(mine.shape) if mine.ndim == 2 else 1e-6 * LR
        assert (mine - other).abs().max().item() <= tolerance, name
    for name, param, group in optimizer.named_params():
        source = muon if group["use_muon"] else adamw
        state = source.state[dict(theirs.named_parameters())[name]]
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, state[key]), (name, key)


def test_a_state_dict_by_names_needs_no_names():
    theirs = make_model()
    optimizers = torch_optimizers(theirs)
    set_grads(theirs, 0)
    for optimizer in optimizers:
        optimizer.step()
    state_dict = get_optimizer_state_dict(theirs, optimizers)
    report = dmuon.adopt_state(make_muon(make_model()), state_dict, source="torch")
    assert len(report.adopted) == 8


def test_report_says_what_was_mapped():
    _, source = train_source("dion", 2)
    model = make_model().bfloat16()
    # --8<-- [start:dion]
    names = ["up.weight", "down.weight", "up.bias", "down.bias"]  # in the order of its groups
    optimizer = dmuon.Muon(
        dmuon.param_groups(model), lr=0.02, momentum=0.9, nesterov=False, betas=(0.9, 0.95)
    )
    report = dmuon.adopt_state(optimizer, source.state_dict(), source="dion", names=[names])
    # --8<-- [end:dion]
    assert str(report).splitlines() == [
        "adopted the state of 4 parameters",
        "up.weight: momentum_buffer from momentum, times 0.1 (float32 to bfloat16)",
        "down.weight: momentum_buffer from momentum, times 0.1 (float32 to bfloat16)",
        "up.bias: step (number to float32)",
        "up.bias: exp_avg from momentum (float32 to bfloat16)",
        "up.bias: exp_avg_sq from variance (float32 to bfloat16)",
        "down.bias: step (number to float32)",
        "down.bias: exp_avg from momentum (float32 to bfloat16)",
        "down.bias: exp_avg_sq from variance (float32 to bfloat16)",
        "different: muon adjust_lr_fn original here, a factor of 1 in the source (2 parameters)",
    ]


def test_adoption_leaves_the_source_and_the_hyperparameters_alone():
    _, source = train_source("dion", 2)
    state_dict = source.state_dict()
    before = state_dict["state"][0]["momentum"].clone()
    model = make_model()
    optimizer = make_muon(model, lr=0.5)
    dmuon.adopt_state(optimizer, state_dict, source="dion", names=[MUON + ADAMW])
    assert torch.equal(state_dict["state"][0]["momentum"], before)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def test_parts_that_ranks_held_are_joined():
    # MuonWithAuxAdam keeps a matrix's momentum on one rank only, and the rest on all.
    _, source = train_source("keller", 2)
    whole = source.state_dict()
    parts = [
        {**whole, "state": {k: v for k, v in whole["state"].items() if k != absent}}
        for absent in (0, 1)
    ]
    optimizer = make_muon(make_model())
    report = dmuon.adopt_state(optimizer, parts, source="keller", names=[MUON + ADAMW] * 2)
    assert len(report.adopted) == 8
    with pytest.raises(ValueError, match=r"up\.weight: the source has no state for it"):
        dmuon.adopt_state(optimizer, parts[0], source="keller", names=[MUON + ADAMW])


def test_parts_that_differ_raise():
    _, one = train_source("keller", 2)
    _, other = train_source("keller", 3)
    with pytest.raises(ValueError, match=r"up\.weight: two state dicts hold different state"):
        dmuon.adopt_state(
            make_muon(make_model()),
            [one.state_dict(), other.state_dict()],
            source="keller",
            names=[MUON + ADAMW] * 2,
        )


def refused(state_dict, match, *, source="keller", names=(MUON + ADAMW,), optimizer=None):
    """Assert that adoption raises and changes nothing."""
    optimizer = optimizer or make_muon(make_model())
    with pytest.raises(ValueError, match=match):
        dmuon.adopt_state(optimizer, state_dict, source=source, names=names)
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())


def test_misfits_name_the_parameters():
    saved = train_source("keller", 1)[1].state_dict()
    swapped = [*reversed(MUON), *ADAMW]
    refused(
        saved, r"(?s)up\.weight: momentum_buffer has shape \(3, 7\).*largest first", names=[swapped]
    )
    crossed = [*ADAMW, *MUON]
    refused(saved, r"up\.bias: goes to adamw here .* has momentum_buffer", names=[crossed])
    strange = [*MUON, "up.bias", "other.bias"]
    refused(
        saved, r"(?s)down\.bias: the source has no.*other\.bias: exp_avg: has no", names=[strange]
    )
    refused(saved, "4 parameters, but 5 names", names=[[*MUON, *ADAMW, "more"]])
    refused(saved, "state dict 0 has no names", names=None)
    refused(saved, "source 'other' is unknown", source="other")
    del saved["param_groups"][0]["momentum"]
    with pytest.raises(ValueError, match=r"up\.weight: its group .* has no momentum"):
        dmuon.adopt_state(
            make_muon(make_model()),
            saved,
            source="keller",
            momentum="heavy_ball",
            names=[MUON + ADAMW],
        )
    unnamed = dmuon.Muon(pick(make_model(), MUON))
    refused(saved, "parameter group 0 has no names", optimizer=unnamed)


def test_state_of_another_algorithm_is_not_momentum():
    # Both algorithms call it `momentum` in microsoft/dion.
    _, source = train_source("dion", 1)
    saved = source.state_dict()
    saved["param_groups"][0]["algorithm"] = "lion"
    refused(
        saved, r"up\.weight: goes to muon here .* the source has momentum, of lion", source="dion"
    )


def test_without_strict_the_rest_starts_afresh():
    _, source = train_source("keller", 2)
    optimizer = make_muon(make_model())
    names = ["old.weight", "down.weight", "up.bias", "down.bias"]
    report = dmuon.adopt_state(
        optimizer, source.state_dict(), source="keller", names=[names], strict=False
    )
    assert report.fresh == ("up.weight",)
    assert report.unused == ("old.weight: momentum_buffer",)
    assert not optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"].any()


def test_wrappers_in_names_do_not_matter():
    _, source = train_source("keller", 1)
    names = [f"module._orig_mod.{name}" for name in MUON + ADAMW]
    report = dmuon.adopt_state(
        make_muon(make_model()), source.state_dict(), source="keller", names=[names]
    )
    assert not report.fresh


def step_after_adoption(layout):
    theirs, source = train_source("dion", 2)
    model = make_model()
    model.load_state_dict(theirs.state_dict())
    options = {"momentum": 0.9, "nesterov": False}
    if layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if layout == "zero1":
        options |= {"process_group": dist.group.WORLD, "shard_state": True}
    optimizer = make_muon(model, **options)
    dmuon.adopt_state(optimizer, source.state_dict(), source="dion", names=[MUON + ADAMW])
    whole = make_model()
    set_grads(whole, 3)
    for param, like in zip(model.parameters(), whole.parameters(), strict=True):
        param.grad = like.grad
        if isinstance(param, DTensor):
            param.grad = distribute_tensor(like.grad, param.device_mesh, param.placements)
    optimizer.step()
    weights = [param.detach() for param in model.parameters()]
    return [w.full_tensor() if isinstance(w, DTensor) else w for w in weights]


@pytest.mark.parametrize("layout", ["fsdp2", "zero1"])
def test_a_sharded_optimizer_adopts_whole_tensors(run_ranks, layout):
    one = step_after_adoption("one process")
    for weights in run_ranks(2, step_after_adoption, layout):
        for mine, other in zip(weights, one, strict=True):
            assert (mine - other).abs().max().item() <= 1e-5 * LR


def test_master_weights_stay():
    _, source = train_source("keller", 2)
    model = make_model().bfloat16()
    optimizer = make_muon(model, master_weights=True)
    dmuon.adopt_state(optimizer, source.state_dict(), source="keller", names=[MUON + ADAMW])
    for name, param, _ in optimizer.named_params():
        assert torch.equal(optimizer.state[param]["master_weight"], param.float()), name
