"""Groups in which ranks exchange and agree."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dmuon.transport import groups as groups_module
from dmuon.transport.agreement import agree, gather
from dmuon.transport.groups import Groups, host_device


def agree_on_a_job_of_devices():
    """As if the job's own group took no tensors on the host; ranks are in different groups."""
    dist.new_group([0])
    world = dist.group.WORLD

    def backends(group):
        return "cuda:nccl" if group is world else "cpu:gloo"

    original, groups_module.dist.get_backend_config = dist.get_backend_config, backends
    try:
        groups, domain = Groups(), tuple(range(dist.get_world_size()))
        group = groups.host(domain)
        assert group is not world
        assert groups.host(domain) is group
        assert groups.of(domain) is world
        same, flags = agree(groups, domain, bytes(8), [dist.get_rank() == 1, False])
        assert gather(groups, domain, dist.get_rank()) == {0: 0, 1: 1}
    finally:
        groups_module.dist.get_backend_config = original
    return same, flags


def test_a_job_on_devices_agrees_on_its_hosts(run_ranks):
    assert run_ranks(2, agree_on_a_job_of_devices) == [(True, [True, False])] * 2


def agree_in_the_jobs_own_group():
    groups, domain = Groups(), tuple(range(dist.get_world_size()))
    assert groups.host(domain) is dist.group.WORLD
    assert host_device(dist.group.WORLD) == torch.device("cpu")
    return agree(groups, domain, bytes([dist.get_rank()] * 8), [False])


def test_a_job_that_takes_host_tensors_needs_no_further_group(run_ranks):
    assert run_ranks(2, agree_in_the_jobs_own_group) == [(False, [False])] * 2
