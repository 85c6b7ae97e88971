"""Muon as an ordinary `torch.optim.Optimizer`: groups, state, and a step that reads like DESIGN."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, zeros
from torch.optim.optimizer import Optimizer, ParamsT

from dmuon import adamw
from dmuon.exchange import Exchange
from dmuon.groups import (
    ROUTING_DEFAULTS,
    check_hyperparameters,
    check_params,
    normalize_group,
    param_names,
)
from dmuon.parameters import (
    MuonParam,
    NamedParam,
    PlannedParams,
    local,
    local_grad,
    signature,
)
from dmuon.pipeline import Life, StepStats, bucket_life, drive, once
from dmuon.plan import build_plan
from dmuon.report import Report, build_report
from dmuon.update import AdjustLr

Coefficients = tuple[float, float, float] | str | Sequence[tuple[float, float, float]]

_MIB = 2**20


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
        bucket_cap_mb: Bound on the mebibytes that one owner receives in one exchange, and so on
            scratch memory; a larger matrix travels alone.

    Attributes:
        stats: What this rank did in the last step.

    Raises:
        ValueError: A hyperparameter is unknown or out of range, or a parameter of a Muon group is
            not a matrix. `step` raises on all ranks if their plans differ.

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
        bucket_cap_mb: float = 64.0,
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
        self._process_group = process_group
        self._shard_state = shard_state
        self._bucket_bytes = int(bucket_cap_mb * _MIB)
        self._exchange = Exchange()
        self._planned: PlannedParams | None = None
        self.stats = StepStats()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, at any time.

        Args:
            param_group: As in the constructor.

        Raises:
            ValueError: As in the constructor; the optimizer is then unchanged.
        """
        number = len(self.param_groups)
        super().add_param_group(normalize_group(param_group, self.defaults, number))
        group = self.param_groups[number]
        try:
            check_hyperparameters(group, f"parameter group {number}")
            check_params(group, param_names(group, number))
        except ValueError:
            del self.param_groups[number]
            raise
        self._init_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: Ranks disagree about a parameter, or no Muon parameter has a gradient on
                any rank although some require one.

        Collective: every rank that holds a part of any parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        planned = self._plan()
        absent = self._absent(planned)
        stats = StepStats()
        before = self._exchange.bytes_sent, self._exchange.num_collectives
        drive(self._lives(planned, absent, stats))
        stats.bytes_sent = self._exchange.bytes_sent - before[0]
        stats.num_collectives = self._exchange.num_collectives - before[1]
        self.stats = stats
        return loss

    def report(self) -> Report:
        """Describe every parameter: algorithm, rule, matrices, owners and learning-rate scale."""
        return build_report(self._named_params(), self._make_plan().plan)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a loaded state dict."""
        self.__dict__.setdefault("_process_group", None)
        self.__dict__.setdefault("_shard_state", False)
        self.__dict__.setdefault("_bucket_bytes", 64 * _MIB)
        self.__dict__.setdefault("_exchange", Exchange())
        self.__dict__.setdefault("stats", StepStats())
        self._planned = None
        super().__setstate__(state)
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, default)

    def _named_params(self) -> Iterator[NamedParam]:
        for number, group in enumerate(self.param_groups):
            for name, param in zip(param_names(group, number), group["params"], strict=True):
                yield name, param, group

    def _init_state(self) -> None:
        """Make the state of every parameter, and drop that of parameters that are gone."""
        for _, param, group in self._named_params():
            if not self.state[param]:
                state = (
                    {"momentum_buffer": self._new_momentum(param)}
                    if group["use_muon"]
                    else adamw.new_state(param)
                )
                self.state[param].update(state)
        current = {id(param) for _, param, _ in self._named_params()}
        for param in [p for p in self.state if id(p) not in current]:
            del self.state[param]

    def _new_momentum(self, param: Tensor) -> Tensor:
        if not self._shard_state or isinstance(param, DTensor):
            return torch.zeros_like(param, memory_format=torch.preserve_format)
        group = cast("dist.ProcessGroup", self._process_group)
        mesh = DeviceMesh.from_group(group, param.device.type)
        return cast(
            "Tensor",
            zeros(param.shape, dtype=param.dtype, device_mesh=mesh, placements=[Shard(0)]),
        )

    def _plan(self) -> PlannedParams:
        """The plan for the parameters as they are now, agreed on by all ranks."""
        if self._planned is None or self._planned.signature != signature(self._named_params()):
            self._init_state()
            planned = self._make_plan()
            if self._process_group is not None:
                self._exchange.adopt(self._process_group)
            for p in planned.params:
                if isinstance(p.param, DTensor) and p.param.device_mesh.ndim == 1:
                    self._exchange.adopt(p.param.device_mesh.get_group())
            self._exchange.prepare(planned.plan, planned.devices)
            self._planned = planned
        return self._planned

    def _make_plan(self) -> PlannedParams:
        params = [
            MuonParam.read(named, self.state[named[1]]["momentum_buffer"], self._process_group)
            for named in self._named_params()
            if named[2]["use_muon"]
        ]
        requests = [request for p in params for request in p.requests()]
        plan = build_plan(requests, bucket_bytes=self._bucket_bytes)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return PlannedParams(signature(self._named_params()), params, plan, rank)

    def _absent(self, planned: PlannedParams) -> frozenset[str]:
        """Muon parameters that have no gradient on any rank.

        Only a rank that misses a gradient waits for the answer: to the others it makes no
        difference, since their own gradients say that the parameter takes part.
        """
        pending = []
        for domain, params in planned.by_domain.items():
            flags = [p.has_grad for p in params]
            agreement = self._exchange.agree(domain, flags, planned.devices[domain])
            pending.append((params, flags, agreement))
        absent = set()
        for params, flags, agreement in pending:
            if not all(flags):
                agreed = agreement.wait()
                absent |= {p.fqn for p, flag in zip(params, agreed, strict=True) if not flag}
        idle = [p.fqn for p in planned.params if p.param.requires_grad and p.fqn in absent]
        if idle and len(absent) == len(planned.params):
            raise RuntimeError(
                f"{idle[0]}: no parameter of the Muon groups has a gradient on any rank. Call "
                "backward() first; if the model was wrapped, sharded or moved after the optimizer "
                "was built, the optimizer still holds the old parameters: build it afterwards, or "
                "replace the parameters in its param_groups"
            )
        return frozenset(absent)

    def _lives(
        self, planned: PlannedParams, absent: frozenset[str], stats: StepStats
    ) -> Iterator[Life]:
        """Every bucket, with AdamW after the first has been sent on its way."""
        shards = planned.local_shards(absent)
        others = once(self._adamw_step)
        for i, part in enumerate(planned.parts(absent)):
            yield bucket_life(
                part,
                shards,
                exchange=self._exchange,
                device=planned.devices[part.bucket.domain],
                stats=stats,
            )
            if i == 0:
                yield others
        yield others

    def _adamw_step(self) -> None:
        for group in self.param_groups:
            if group["use_muon"]:
                continue
            params = [p for p in group["params"] if p.requires_grad and p.grad is not None]
            adamw.adamw_(
                [local(p) for p in params],
                [local_grad(p) for p in params],
                [{key: local(value) for key, value in self.state[p].items()} for p in params],
                group,
            )
