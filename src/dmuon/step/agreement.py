"""What ranks agree on before a step: whose gradients are there, and whether all are finite."""

from __future__ import annotations

from dmuon.step.parameters import PlannedParams, first_nonfinite
from dmuon.transport.exchange import Exchange


def absent_params(planned: PlannedParams, exchange: Exchange) -> frozenset[str]:
    """Find the parameters that have no gradient on any rank.

    Only a rank that misses a gradient waits for the answer: to the others it makes no difference,
    since their own gradients say that the parameter takes part.

    Raises:
        RuntimeError: No Muon parameter of this rank has a gradient on any rank that shares it,
            although some require one.

    Collective: all ranks of each domain.
    """
    pending = []
    for domain, params in planned.by_domain.items():
        flags = [p.has_grad for p in params]
        agreement = exchange.agree(domain, flags, planned.devices[domain])
        pending.append((params, flags, agreement))
    absent = set()
    for params, flags, agreement in pending:
        if not all(flags):
            agreed = agreement.wait()
            absent |= {p.fqn for p, flag in zip(params, agreed, strict=True) if not flag}
    # A parameter of this rank alone (an expert without tokens) says nothing about the others.
    alone = len(planned.job[0]) == 1
    idle = [
        p.fqn
        for p in planned.params
        if p.param.requires_grad and p.fqn in absent and (alone or len(p.domain) > 1)
    ]
    if idle and all(p.fqn in absent for p in planned.params):
        raise RuntimeError(
            f"{idle[0]}: no parameter of the Muon groups has a gradient on the ranks that share "
            "it. Call backward() first; if the model was wrapped, sharded or moved after the "
            "optimizer was built, the optimizer still holds the old parameters: build it "
            "afterwards, or replace the parameters in its param_groups"
        )
    return frozenset(absent)


def nonfinite_param(planned: PlannedParams, exchange: Exchange, *, name_it: bool) -> str | None:
    """Find a parameter whose gradient has an infinite or NaN element on some rank.

    Args:
        planned: The parameters.
        exchange: Transport.
        name_it: Return the parameter's name on all ranks; else only whether there is one.

    Returns:
        None if all gradients are finite.

    Blocks: the host waits for the device.

    Collective: all ranks of the job.
    """
    fqn = first_nonfinite(planned.everyone)
    job, device = planned.job
    (found,) = exchange.agree(job, [fqn is not None], device).wait()
    if not found:
        return None
    return exchange.first_of(job, fqn) if name_it else fqn or "a parameter of another rank"
