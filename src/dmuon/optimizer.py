"""Muon as an ordinary `torch.optim.Optimizer`; its step reads like docs/design.md."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT

from dmuon.algorithms import adamw
from dmuon.algorithms.update import AdjustLr, refresh_, store_
from dmuon.options import (
    ROUTING_DEFAULTS,
    check_hyperparameters,
    check_names,
    check_params,
    normalize_group,
    param_names,
)
from dmuon.plan.cost import CostModel, Timings
from dmuon.plan.plan import build_plan
from dmuon.plan.report import Report, build_report
from dmuon.state.checkpoint import Fitted, fit_state_dict, pack_group
from dmuon.state.initial import new_state
from dmuon.step.agreement import absent_params, nonfinite_param
from dmuon.step.bucket import Life, StepStats, bucket_life, drive
from dmuon.step.parameters import (
    AdamWParam,
    MuonParam,
    NamedParam,
    PlannedParams,
    job_of,
    local,
    local_grad,
    signature,
)
from dmuon.transport.exchange import Exchange
from dmuon.tuning.measure import timings_allowed
from dmuon.tuning.table import load

Coefficients = tuple[float, float, float] | str | Sequence[tuple[float, float, float]]

_MIB = 2**20
_NONFINITE = ("propagate", "skip", "raise")


def _eager(step: Callable[..., Any]) -> Callable[..., Any]:
    """Run `step` as it is under `torch.compile`, which would trace the planner.

    `torch.compiler.disable` as a decorator would make `import dmuon` import the compiler.
    """

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - step's own
        if torch.compiler.is_compiling():
            return torch.compiler.disable(step)(*args, **kwargs)
        return step(*args, **kwargs)

    return run


class Muon(Optimizer):
    r"""Muon for hidden matrices and AdamW for the rest, on any sharding, in one optimizer.

    Each matrix is orthogonalized once in the whole job, by one rank, and the weights are the same
    as those of one process:

    .. math::
        B_t = \mu B_{t-1} + (1 - \mu) G_t, \quad
        U_t = (1 - \mu) G_t + \mu B_t \text{ (nesterov) else } B_t, \quad
        W_t = (1 - \gamma \lambda) W_{t-1} - \gamma\, s(M, N)\, \mathrm{NS}(U_t)

    Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon); the names and defaults are
    those of `torch.optim.Muon`.

    **Momentum** is an exponential moving average, as in `torch.optim.Muon`. A buffer written by an
    implementation of `B <- mu B + G` is `1 / (1 - mu)` times larger.

    **Learning rates** are comparable only within one `adjust_lr_fn`. The default `lr=1e-3` and
    `adjust_lr_fn=None` ("original") are torch's; 0.02 is usual with "original". Use
    "match_rms_adamw" to share AdamW's learning rate and weight decay. As in any torch optimizer,
    `lr` and `weight_decay` given here are also the defaults of AdamW groups.

    Parameters may be plain tensors or DTensors with any `Shard` / `Replicate` placements (FSDP2,
    HSDP, tensor and expert parallelism), of several meshes. Momentum has the dtype and layout of
    its parameter; loading a state dict converts it to that dtype.

    A parameter without gradient on all ranks is left untouched. Where some ranks have a gradient
    and others do not, the missing ones count as zeros.

    Args:
        params: Groups from `dmuon.param_groups(model)`, or any params, named params or groups as
            torch takes them. Groups take the keys `use_muon` (or `algorithm`: "muon", "adamw"),
            `flatten` (convolutions: `out x rest`), `split` (row sizes, or `dmuon.Split`), and the
            hyperparameters below.
        lr: Learning rate, a float or a one-element Tensor.
        weight_decay: Decoupled weight decay, multiplied by the unscaled `lr`.
        momentum: Momentum of Muon groups.
        nesterov: Look ahead along the gradient.
        ns_coefficients: `(a, b, c)` for every step, a named list such as "polar_express", or one
            triple per step.
        eps: Lower bound of a matrix's norm *after* its largest entry is scaled to 1, so it is not
            a floor for small gradients. AdamW groups have their own `eps`, 1e-8.
        ns_steps: Number of Newton-Schulz steps.
        adjust_lr_fn: Learning-rate scale `s(M, N)` of a logical matrix: None or "original",
            "match_rms_adamw", "spectral", "spectral_unclamped", or a function of `(rows, cols)`.
            See `dmuon.update.lr_scale`.
        ns_dtype: dtype of Newton-Schulz; None is float32 on CPU and bfloat16 elsewhere.
        betas: Coefficients of AdamW groups.
        process_group: Ranks over which *plain* tensors are replicated (DDP). Without it a plain
            tensor belongs to this rank alone.
        shard_state: Keep the momentum of such replicated tensors once in the job, as a DTensor
            sharded over `process_group` (ZeRO-1).
        master_weights: Keep a float32 copy (`master_weight`) of every bfloat16 or float16
            parameter, and its state in float32: the parameter is then the rounded copy of what
            float32 training would give. An element that was changed from outside since the last
            step (a loaded model, clipped weights) is taken from the parameter.
        repeat_ns: Orthogonalize once per replica (HSDP, DDP) instead of once in the whole job:
            nothing then moves between replicas. For replicas joined by a slow network.
        bucket_cap_mb: Bound on the mebibytes that one owner receives in one exchange, and so on
            scratch memory; a larger matrix travels alone. Padding by a `tuning` table may double
            what an owner stacks.
        nonfinite: What `step` does about an infinite or NaN gradient: "propagate" it, into that
            parameter alone; or "skip" the step, or "raise", on all ranks and with weights, state
            and step counts untouched. The last two wait for the device, and every rank of the
            default process group must then call `step` if any parameter lies on several ranks.
        tuning: File written by `dmuon tune`, the same on all ranks: how to orthogonalize each
            shape, and the times by which owners are balanced instead of FLOPs.

    Attributes:
        process_group: As given.
        stats: What this rank did in the last step.
        skipped_steps: Steps left out by `nonfinite="skip"` since this object was made.

    Raises:
        ValueError: A hyperparameter is unknown or out of range, or a parameter of a Muon group is
            not a matrix.
        RuntimeError: From `step`, on all ranks, if their plans differ.

    Collective: `step` must be called by every rank that holds a part of any parameter.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - torch.optim.Muon's order and names
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr = None,
        *,
        ns_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        process_group: dist.ProcessGroup | None = None,
        shard_state: bool = False,
        master_weights: bool = False,
        repeat_ns: bool = False,
        bucket_cap_mb: float = 64.0,
        nonfinite: Literal["propagate", "skip", "raise"] = "propagate",
        tuning: str | os.PathLike[str] | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "betas": betas,
            **ROUTING_DEFAULTS,
        }
        check_hyperparameters(defaults, "Muon")
        if shard_state and process_group is None:
            raise ValueError("shard_state=True needs the process_group of the replicated tensors")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be > 0, got {bucket_cap_mb}")
        if nonfinite not in _NONFINITE:
            raise ValueError(f"nonfinite must be one of {_NONFINITE}, got {nonfinite!r}")
        self.process_group = process_group
        self._nonfinite = nonfinite
        self._tuning = Timings() if tuning is None else load(tuning)
        self._shard_state = shard_state
        self._master_weights = master_weights
        self._repeat_ns = repeat_ns
        self._bucket_bytes = int(bucket_cap_mb * _MIB)
        self._exchange = Exchange()
        self._planned: PlannedParams | None = None
        self.stats = StepStats()
        self.skipped_steps = 0
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, at any time.

        A group without parameters is left out: distributed checkpoints cannot describe it.

        Args:
            param_group: As in the constructor.

        Raises:
            ValueError: As in the constructor; the optimizer is then unchanged.
        """
        number = len(self.param_groups)
        normalized = normalize_group(param_group, self.defaults, number)
        if not isinstance(normalized["params"], (Tensor, set)):
            normalized["params"] = list(normalized["params"])
            if not normalized["params"]:
                return
        super().add_param_group(normalized)
        group = self.param_groups[number]
        try:
            check_hyperparameters(group, f"parameter group {number}")
            check_params(group, param_names(group, number))
            check_names(name for name, _, _ in self._named_params())
        except BaseException:
            del self.param_groups[number]
            raise
        self._init_state()

    @_eager
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: Re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: Ranks disagree about a parameter, or no Muon parameter has a gradient on
                any rank although some require one; or, with `nonfinite="raise"`, a gradient is
                not finite on some rank.

        Collective: every rank that holds a part of any parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        planned = self._plan()
        if self._skips(planned):
            self.stats = StepStats()
            self.skipped_steps += 1
            return loss
        absent = absent_params(planned, self._exchange)
        stats = StepStats()
        before = self._exchange.bytes_sent, self._exchange.num_collectives
        params, masters = self._master_pairs()
        refresh_(masters, params)
        drive(self._lives(planned, absent, stats))
        store_(params, masters)
        stats.bytes_sent = self._exchange.bytes_sent - before[0]
        stats.num_collectives = self._exchange.num_collectives - before[1]
        self.stats = stats
        return loss

    def report(self) -> Report:
        """Describe every parameter: algorithm, rule, matrices, owners and learning-rate scale."""
        self._init_state()  # for parameters that have been replaced since
        return build_report(self._named_params(), self._make_plan().plan)

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle or a copy holds, besides parameters and their state: the settings."""
        settings = [
            *("process_group", "_shard_state", "_master_weights"),
            *("_repeat_ns", "_bucket_bytes", "_nonfinite", "_tuning"),
        ]
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in settings}}

    def __deepcopy__(self, memo: dict[int, Any]) -> Muon:
        """Copy parameters and state; process groups are shared."""
        memo[id(self.process_group)] = self.process_group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every parameter, and the groups with plain values.

        As in `torch.optim.Optimizer`, tensors are not copied. `momentum_buffer`, or `step`,
        `exp_avg` and `exp_avg_sq`, are there from construction. A function `adjust_lr_fn` cannot
        be saved and is given by name.
        """
        self._init_state()
        state_dict = super().state_dict()
        groups = [pack_group(group) for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this layout; from another, DCP reshards it on the way.

        Hyperparameters are taken from `state_dict`; how parameters are routed and split stays as
        it is. State is converted to the dtype that it has here, and a whole tensor is cut to the
        parameter's shard. A parameter without saved state starts afresh.

        Args:
            state_dict: Not modified. Tensors that need no conversion are not copied.

        Raises:
            ValueError: It belongs to other parameters, to the other algorithm or to another
                layout; the optimizer is then unchanged.
        """
        # Registered last, so that it sees what the user's own hooks return.
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: self._fit(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _fit(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return fit_state_dict(
            state_dict,
            self.param_groups,
            lambda param, group: self.state.get(param) or self._new_state(param, group),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a loaded state dict."""
        self.__dict__.setdefault("_exchange", Exchange())
        self.__dict__.setdefault("stats", StepStats())
        self.__dict__.setdefault("skipped_steps", 0)
        self._planned = None
        super().__setstate__(state)
        # Added by torch, and only to an optimizer that has loaded: flattened state dicts of one
        # that has not would lack it.
        self.defaults.pop("differentiable", None)
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, default)
        for values in self.state.values():
            values.update({k: v.tensor for k, v in values.items() if isinstance(v, Fitted)})
        self._init_state()

    def _named_params(self) -> Iterator[NamedParam]:
        for number, group in enumerate(self.param_groups):
            for name, param in zip(param_names(group, number), group["params"], strict=True):
                yield name, param, group

    def _init_state(self) -> None:
        """Make the state of every parameter, and drop that of parameters that are gone."""
        for _, param, group in self._named_params():
            if param.requires_grad and not self.state.get(param):
                self.state[param].update(self._new_state(param, group))
        current = {id(param) for _, param, _ in self._named_params()}
        for param in [p for p in self.state if id(p) not in current]:
            del self.state[param]

    def _new_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        return new_state(
            param,
            use_muon=group["use_muon"],
            master_weights=self._master_weights,
            shard_over=self.process_group if self._shard_state else None,
        )

    def _plan(self) -> PlannedParams:
        """The plan for the parameters as they are now, agreed on by all ranks."""
        if self._planned is None or self._planned.signature != self._signature():
            for number, group in enumerate(self.param_groups):
                check_params(group, param_names(group, number))
            self._init_state()
            planned = self._make_plan()
            if self.process_group is not None:
                self._exchange.adopt(self.process_group)
            for params in planned.by_domain.values():
                for param in [p.param for p in params]:
                    if isinstance(param, DTensor) and param.device_mesh.ndim == 1:
                        self._exchange.adopt(param.device_mesh.get_group())
            self._exchange.prepare(planned.devices, planned.describe)
            self._planned = planned
        return self._planned

    def _make_plan(self) -> PlannedParams:
        rank = dist.get_rank() if dist.is_initialized() else 0
        # One that has been frozen since the optimizer was built has no state.
        managed = [named for named in self._named_params() if self.state.get(named[1])]
        params = [
            MuonParam.read(named, self.state[named[1]], self.process_group)
            for named in managed
            if named[2]["use_muon"]
        ]
        others = [
            AdamWParam.read(named, self.state[named[1]], self.process_group)
            for named in managed
            if not named[2]["use_muon"]
        ]
        job = job_of([*params, *others], rank)
        # A rank may hold DTensors of meshes that it is no part of; it stores nothing of them.
        params = [p for p in params if rank in p.domain]
        timings = self._tuning if timings_allowed() else Timings()
        requests = [request for p in params for request in p.requests(timings)]
        plan = build_plan(
            requests,
            bucket_bytes=self._bucket_bytes,
            cost_model=CostModel(timings.seconds_per_step()),
            repeat=self._repeat_ns,
        )
        others = [p for p in others if rank in p.domain]
        return PlannedParams(self._signature(), params, others, plan, rank, job)

    def _signature(self) -> list[object]:
        return signature(self._named_params(), self.state)

    def _skips(self, planned: PlannedParams) -> bool:
        """Whether no rank takes this step because a gradient of some rank is not finite."""
        if self._nonfinite == "propagate":
            return False
        raises = self._nonfinite == "raise"
        fqn = nonfinite_param(planned, self._exchange, name_it=raises)
        if raises and fqn is not None:
            raise RuntimeError(
                f"{fqn}: the gradient has an infinite or NaN element, so no rank took this step. "
                "Weights and optimizer state are unchanged; lower the learning rate or the loss "
                "scale, look for the cause with torch.autograd.detect_anomaly(), or pass "
                'nonfinite="skip"'
            )
        return fqn is not None

    def _master_pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Local shards of the parameters that have master weights, and those."""
        pairs = {p: s["master_weight"] for p, s in self.state.items() if "master_weight" in s}
        return [*map(local, pairs)], [*map(local, pairs.values())]

    def _lives(
        self, planned: PlannedParams, absent: frozenset[str], stats: StepStats
    ) -> Iterator[Life]:
        """Every bucket; AdamW runs while the pieces of the first are on their way."""
        shards = planned.local_shards(absent)
        parts = planned.parts(absent)
        for part in parts:
            yield bucket_life(
                part,
                shards,
                exchange=self._exchange,
                device=planned.device(part.bucket),
                tuning=self._tuning if timings_allowed() else Timings(),
                stats=stats,
            )
            if part is parts[0]:
                self._adamw_step(planned, absent)
        if not parts:
            self._adamw_step(planned, absent)

    def _adamw_step(self, planned: PlannedParams, absent: frozenset[str]) -> None:
        present = [p for p in planned.others if p.fqn not in absent]
        for group in self.param_groups:
            params = [p for p in present if p.group is group]
            if params:
                pairs = [(p, self.state[p.param]) for p in params]
                adamw.adamw_(
                    [local(s.get("master_weight", p.param)) for p, s in pairs],
                    [local_grad(p.param) for p in params],
                    [{key: local(value) for key, value in s.items()} for _, s in pairs],
                    group,
                )
