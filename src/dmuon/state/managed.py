"""An optimizer whose state follows its parameters, and fits every kind of checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from dmuon.options import Settings, check_group, check_names, normalize_group, param_names
from dmuon.state.checkpoint import fit_state_dict, pack_group, unwrap_fitted_
from dmuon.state.initial import new_state
from dmuon.state.keep import keep_up

NamedParam = tuple[str, Tensor, dict[str, Any]]
_Self = TypeVar("_Self", bound="ManagedOptimizer")


class ManagedOptimizer(Optimizer):
    """Groups and state of `dmuon.Muon`: checked, kept, copied, saved and loaded.

    Attributes:
        settings: What the optimizer was made with.
    """

    settings: Settings

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, at any time.

        Args:
            param_group: As in the constructor. Keys that are not known stay in the group.

        Raises:
            ValueError: As in the constructor; the optimizer is then unchanged.
        """
        number = len(self.param_groups)
        super().add_param_group(normalize_group(param_group, self.defaults, number))
        try:
            check_group(self.param_groups[number], number)
            check_names(name for name, _, _ in self.named_params())
        except BaseException:
            del self.param_groups[number]
            raise
        self.keep_state()

    def named_params(self) -> list[NamedParam]:
        """Every parameter with its name and its group."""
        return [
            (name, param, group)
            for number, group in enumerate(self.param_groups)
            for name, param in zip(param_names(group, number), group["params"], strict=True)
        ]

    @torch.inference_mode(mode=False)
    def keep_state(self) -> None:
        """Make the state of every parameter that is trained, and drop that of those gone."""
        named = self.named_params()
        for _, param, group in named:
            if param.requires_grad or self.state.get(param):
                keep_up(param, group, self.state[param], self.settings)
        current = {id(param) for _, param, _ in named}
        for param in [p for p in self.state if id(p) not in current]:
            del self.state[param]

    def check(self) -> None:
        """Check all groups and keep the state.

        Raises:
            ValueError: A group does not fit; names it or the parameter.
        """
        for number, group in enumerate(self.param_groups):
            check_group(group, number)
        self.keep_state()

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle or a copy holds, besides parameters and their state: the settings."""
        return {**super().__getstate__(), "settings": self.settings}

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        """Copy parameters and state; process groups are shared."""
        for group in (self.settings.process_group, self.settings.nonfinite_group):
            memo[id(group)] = group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every parameter, and the groups with plain values.

        As in `torch.optim.Optimizer`, tensors are not copied. State is there from construction. A
        function `adjust_lr_fn` cannot be saved and is given by name.
        """
        self.keep_state()
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
        self.keep_state()
        # Registered last, so that it sees what the user's own hooks return.
        handle = self.register_load_state_dict_pre_hook(
            lambda _, loaded: fit_state_dict(loaded, self.param_groups, self._state_of)
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a loaded state dict."""
        super().__setstate__(state)
        # Added by torch, and only to an optimizer that has loaded: flattened state dicts of one
        # that has not would lack it.
        self.defaults.pop("differentiable", None)
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, default)
        unwrap_fitted_(self.state)
        self.keep_state()

    def _state_of(self, param: Tensor, group: Mapping[str, Any]) -> Mapping[str, Tensor]:
        return self.state.get(param) or new_state(param, group, self.settings)
