"""torchtitan (written for 0.3): an optimizer container that holds one `dmuon.Muon` per model part.

torchtitan's own container takes optimizers by name from a closed list, and forms groups by regular
expressions on names; this one takes groups from `dmuon.param_groups`. Checkpoints, schedulers and
step hooks are those of the base class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer

from dmuon.optimizer import Muon
from dmuon.routing.rules import param_groups


class MuonContainer(OptimizersContainer):
    """`dmuon.Muon` for every part of a model that pipeline parallelism cuts.

    Args:
        config: See `default_muon`.
        model_parts: The parts on this rank, sharded.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """What `OptimizersContainer.Config` is to AdamW; the fields of the base are not read.

        Attributes:
            options: Keyword arguments of `dmuon.Muon`.
            routing: Keyword arguments of `dmuon.param_groups`.
        """

        options: dict[str, Any] = field(default_factory=dict)
        routing: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.param_groups:
            raise ValueError(
                "MuonContainer forms its groups with dmuon.param_groups; replace param_groups "
                "by routing, with the rules of dmuon.param_groups (muon=, adamw=, split=)"
            )
        self.model_parts = model_parts
        self.optimizers = [
            Muon(param_groups(part, **config.routing), **config.options) for part in model_parts
        ]
        params = [
            param
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for param in group["params"]
        ]
        self._validate_params(params)
        self._post_init(params)


def default_muon(
    lr: float = 8e-4,
    *,
    routing: dict[str, Any] | None = None,
    **options: Any,  # noqa: ANN401 - as default_adamw
) -> MuonContainer.Config:
    """Return an optimizer config to put where `default_adamw(lr=...)` stood.

    Args:
        lr: Learning rate of Muon and AdamW groups. The update is scaled to AdamW's size
            (`adjust_lr_fn="match_rms_adamw"`), so that the old one carries over.
        routing: Keyword arguments of `dmuon.param_groups`.
        options: Further keyword arguments of `dmuon.Muon`; the defaults of betas and weight decay
            are those of `default_adamw`.

    Returns:
        A config whose `build(model_parts=...)` makes the container.
    """
    defaults = {"betas": (0.9, 0.95), "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    return MuonContainer.Config(options={"lr": lr, **defaults, **options}, routing=routing or {})
