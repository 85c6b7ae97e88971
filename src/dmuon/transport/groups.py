"""Process groups of one optimizer's domains."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.plan.plan import Domain


class Groups:
    """The groups in which the ranks of each domain exchange pieces, and those in which they agree.

    Groups that exist are used where they can serve; others are made when they are first needed,
    by all ranks of the domain.
    """

    def __init__(self) -> None:
        self._groups: dict[Domain, dist.ProcessGroup] = {}
        self._host_groups: dict[Domain, dist.ProcessGroup] = {}

    @staticmethod
    def shared() -> Groups:
        """Those of the default process group, which all optimizers and functions share."""
        world = dist.group.WORLD if dist.is_initialized() else None
        return _SHARED.setdefault(world, Groups()) if world is not None else Groups()

    def adopt(
        self, params: Iterable[Tensor], process_group: dist.ProcessGroup | None = None
    ) -> None:
        """Use the groups of parameters' meshes, and one given, for the domains of their ranks."""
        meshes = dict.fromkeys(p.device_mesh for p in params if isinstance(p, DTensor))
        groups = [mesh.get_group() for mesh in meshes if mesh.ndim == 1 and mesh.get_coordinate()]
        for group in [*groups, *([process_group] if process_group is not None else [])]:
            ranks = tuple(dist.get_process_group_ranks(group))
            # Split sizes are listed by rank, so a group in another order cannot serve.
            if ranks == tuple(sorted(ranks)):
                self._groups.setdefault(ranks, group)

    def of(self, domain: Domain) -> dist.ProcessGroup:
        """The group of a domain, for tensors on its device.

        Collective: all ranks of the domain, the first time.
        """
        if domain not in self._groups:
            world = dist.group.WORLD
            is_world = world is not None and domain == tuple(range(world.size()))
            self._groups[domain] = world if is_world and world is not None else _new(domain, None)
        return self._groups[domain]

    def host(self, domain: Domain) -> dist.ProcessGroup:
        """The group of a domain for tensors on the host: what the host decides, it agrees on there.

        Waiting for it waits for other hosts, and never for a device.

        Collective: all ranks of the domain, the first time.
        """
        if domain not in self._host_groups:
            group = self.of(domain)
            if "cpu" not in dist.get_backend_config(group):
                group = _new(domain, "gloo")
            self._host_groups[domain] = group
        return self._host_groups[domain]


_SHARED: weakref.WeakKeyDictionary[dist.ProcessGroup, Groups] = weakref.WeakKeyDictionary()


def _new(domain: Domain, backend: str | None) -> dist.ProcessGroup:
    """Make a group; ranks outside the domain need not know of it."""
    world = dist.group.WORLD
    assert world is not None
    # torch would take half an hour, not what the user gave to `init_process_group`.
    timeout = world.get_group_store().timeout  # type: ignore[attr-defined]
    group: dist.ProcessGroup = dist.new_group(
        list(domain), timeout=timeout, backend=backend, use_local_synchronization=True
    )
    return group
