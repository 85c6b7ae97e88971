"""Muon as an ordinary `torch.optim.Optimizer`; its step reads like docs/design.md."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from dmuon.algorithms import AdjustLr
from dmuon.options import (
    MIB,
    ROUTING_DEFAULTS,
    Settings,
    check_hyperparameters,
    plain_values,
)
from dmuon.plan.cost import Timings
from dmuon.plan.report import Report, build_report
from dmuon.routing import param_groups
from dmuon.state.managed import ManagedOptimizer
from dmuon.step.bucket import StepStats
from dmuon.step.stepper import Stepper, eager
from dmuon.tuning.table import load, save

Coefficients = tuple[float, float, float] | str | Sequence[tuple[float, float, float]]


class Muon(ManagedOptimizer):
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
        params: A model, which means `dmuon.param_groups(model)`; groups from there, with its
            arguments; or any params, named params or groups as torch takes them. Groups take the
            keys `algorithm` (or `use_muon`), `flatten` (convolutions: `out x rest`), `split` (row
            sizes, or `dmuon.Split`), the hyperparameters below and those of their algorithm.
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
            See `dmuon.lr_scale`.
        algorithm: What optimizes the matrices of groups that do not say: "muon" or "normuon".
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
            and step counts untouched. The last two wait for the device.
        nonfinite_group: Ranks that decide that together, and must all call `step`; None is all.
        tuning: How each shape is orthogonalized, and the times by which owners are balanced
            instead of FLOPs. "auto" measures at the first step, on accelerators; "measure"
            anywhere; or a file that `tune` or `dmuon tune` wrote, the same on all ranks; or None.

    Attributes:
        process_group: As given.
        stats: What this rank did in the last step.
        skipped_steps: Steps left out by `nonfinite="skip"` since this object was made.

    Raises:
        ValueError: A hyperparameter is unknown or out of range, or a parameter of a Muon group is
            not a matrix.
        RuntimeError: From `step`, on all ranks, if their plans or hyperparameters differ.

    Collective: `step` must be called by every rank that holds a part of any parameter.
    """

    stats = StepStats()
    skipped_steps = 0

    def __init__(  # noqa: PLR0913, PLR0917 - torch.optim.Muon's order and names
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr = None,
        *,
        algorithm: str = "muon",
        ns_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        process_group: dist.ProcessGroup | None = None,
        shard_state: bool = False,
        master_weights: bool = False,
        repeat_ns: bool = False,
        bucket_cap_mb: float = 64.0,
        nonfinite: Literal["propagate", "skip", "raise"] = "propagate",
        nonfinite_group: dist.ProcessGroup | None = None,
        tuning: str | os.PathLike[str] | None = "auto",
    ) -> None:
        defaults = plain_values(
            {
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
                "algorithm": algorithm,
                **ROUTING_DEFAULTS,
            }
        )
        check_hyperparameters(defaults, "Muon")
        self.settings = Settings(
            process_group=process_group,
            shard_state=shard_state,
            master_weights=master_weights,
            repeat_ns=repeat_ns,
            bucket_bytes=bucket_cap_mb * MIB,
            nonfinite=nonfinite,
            nonfinite_group=nonfinite_group,
            tuning=_tuning(tuning),
        )
        if isinstance(params, nn.Module):
            params = param_groups(params)
        super().__init__(params, defaults)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """As given."""
        return self.settings.process_group

    @functools.cached_property
    def _stepper(self) -> Stepper:
        return Stepper(self)

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: Re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: A parameter or a gradient cannot be taken on some rank; names it. Weights
                and state are unchanged, on all ranks.
            RuntimeError: Ranks disagree about a parameter or its hyperparameters; no Muon
                parameter has had a gradient on any rank although some require one; or, with
                `nonfinite="raise"`, a gradient is not finite on some rank. Nothing is changed.

        Collective: every rank that holds a part of any parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stats = self._stepper.step()
        self.skipped_steps += stats is None
        self.stats = stats or StepStats()
        return loss

    def report(self) -> Report:
        """Describe every parameter: algorithm, rule, matrices, owners and learning-rate scale."""
        return build_report(self._stepper.plan().plan, self.named_params())

    def tune(self, path: str | os.PathLike[str] | None = None) -> Timings:
        """Measure how to orthogonalize the batches of this model, and follow that from now on.

        Args:
            path: Where the first rank writes the table, for `Muon(tuning=path)`; None: nowhere.

        Returns:
            The fastest correct way for each batch of each rank.

        Collective: every rank that holds a part of any parameter.
        """
        timings, is_first = self._stepper.tune()
        if path is not None and is_first:
            save(path, timings)
        return timings


def _tuning(tuning: str | os.PathLike[str] | None) -> Timings | str:
    if tuning is None:
        return Timings()
    path = os.fspath(tuning)
    return path if path in ("auto", "measure") else load(path)
