"""Process groups of one optimizer's domains."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
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
            self._groups[domain] = world if is_world and world is not None else _new(domain)
        return self._groups[domain]

    def host(self, domain: Domain) -> dist.ProcessGroup:
        """The group of a domain in which hosts agree, with tensors on the host where it can be.

        Waiting for it then waits for other hosts, and never for a device. Part of a job whose
        groups are all on devices has no such group, and none can be made safely: torch names
        groups of some ranks by how many groups each rank is in already.

        Collective: all ranks of the domain, the first time.
        """
        if domain not in self._host_groups:
            group, world = self.of(domain), dist.group.WORLD
            if group is world and world is not None and "cpu" not in dist.get_backend_config(world):
                timeout = world.get_group_store().timeout  # type: ignore[attr-defined]
                group = dist.new_group(backend="gloo", timeout=timeout)
            self._host_groups[domain] = group
        return self._host_groups[domain]


_SHARED: weakref.WeakKeyDictionary[dist.ProcessGroup, Groups] = weakref.WeakKeyDictionary()


def host_device(group: dist.ProcessGroup) -> torch.device:
    """Where the tensors of a group must be on which hosts agree: on the CPU if it takes those."""
    backends = dist.get_backend_config(group)
    if "cpu" in backends:
        return torch.device("cpu")
    kind = backends.split(":")[0]
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _new(domain: Domain) -> dist.ProcessGroup:
    """Make a group; ranks outside the domain need not know of it."""
    world = dist.group.WORLD
    assert world is not None
    # torch would take half an hour, not what the user gave to `init_process_group`.
    timeout = world.get_group_store().timeout  # type: ignore[attr-defined]
    group: dist.ProcessGroup = dist.new_group(
        list(domain), timeout=timeout, use_local_synchronization=True
    )
    return group
