"""All-gather Muon, the first thing one writes for FSDP2: the yardstick of dmuon.

Every rank gathers every momentum matrix, repeats the Newton-Schulz iteration on it, and keeps its
own shard of the result. Everything but where the work happens is as in dmuon: same parameter
groups, same momentum, same `orthogonalize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

import dmuon


@dataclass(frozen=True)
class StepStats:
    """What one rank did in one step; named as in `dmuon.Muon.stats`.

    `bytes_sent` counts what a rank must send: its own shard of every matrix, to every other rank.
    """

    ns_matrices: int = 0
    bytes_sent: int = 0


def gather(update: Tensor) -> tuple[Tensor, int]:
    """Return the whole matrix, and the bytes that this rank must send for it. Collective."""
    if not isinstance(update, DTensor):
        return update, 0
    local = update.to_local()
    num_peers = update.device_mesh.size() - 1
    return update.full_tensor(), local.numel() * local.element_size() * num_peers


def keep_shard(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of `full`, laid out as `like`; nothing is sent."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


class AllGatherMuon(Optimizer):
    """Muon that repeats every matrix on every rank, and AdamW for the `use_muon=False` groups.

    The update scale is `match_rms_adamw`, 0.2 * sqrt(max(rows, columns)) (arXiv 2502.16982).

    Args:
        params: Groups as made by `dmuon.param_groups`; only whole 2-D weights in its Muon groups.
        lr: Learning rate of every group that has none of its own.
        weight_decay: Decoupled weight decay, `p *= 1 - lr * weight_decay`.
        momentum: Decay of the momentum average, `buffer.lerp_(grad, 1 - momentum)`.
        nesterov: Look one step ahead, `grad.lerp(buffer, momentum)`.
        betas: Coefficients of AdamW groups.
        coefficients: One (a, b, c) per Newton-Schulz iteration.
        ns_dtype: Newton-Schulz runs in this dtype; None leaves it to `dmuon.orthogonalize`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        coefficients: tuple[tuple[float, float, float], ...] = ((3.4445, -4.7750, 2.0315),) * 5,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "use_muon": True, "betas": betas}
        super().__init__(params, defaults)
        self.momentum, self.nesterov = momentum, nesterov
        self.coefficients, self.ns_dtype = coefficients, ns_dtype
        self.stats = StepStats()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Collective: every rank, same order."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        num_matrices = bytes_sent = 0
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not group["use_muon"]:
                self._adamw(params, group)
                continue
            for parameter in params:
                bytes_sent += self._muon(parameter, group)
            num_matrices += len(params)
        self.stats = StepStats(num_matrices, bytes_sent)
        return loss

    def _muon(self, parameter: Tensor, group: dict[str, Any]) -> int:
        """Update one matrix and return the bytes sent for it."""
        grad, state = parameter.grad, self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - self.momentum)
        update = grad.lerp(buffer, self.momentum) if self.nesterov else buffer
        full, bytes_sent = gather(update)
        full = dmuon.orthogonalize(full, coefficients=self.coefficients, dtype=self.ns_dtype)
        scale = 0.2 * max(parameter.shape) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(keep_shard(full, parameter).to(parameter.dtype), alpha=-group["lr"] * scale)
        return bytes_sent

    def _adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Update a list of parameters with torch's own AdamW."""
        for parameter in params:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in params]
        beta1, beta2 = group["betas"]
        adamw(
            params,
            [parameter.grad for parameter in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group.get("eps", 1e-8),
            maximize=False,
        )
