"""What every rank knows before a step changes anything: is all well, and whose gradients are there.

See [Note: agreed before anything moves] in `dmuon.transport.agreement`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.plan.fingerprint import Description, first_difference
from dmuon.plan.plan import Domain
from dmuon.transport.agreement import DIGEST_SIZE, agree, gather, maxima
from dmuon.transport.groups import Groups
from dmuon.transport.reduce import ABSENT, PRESENT, code_of, reduce_

NamedTensors = Sequence[tuple[str, Tensor]]
_ERRORS = {error.__name__: error for error in (RuntimeError, TypeError, ValueError)}


def settle_gradients(
    groups: Groups,
    members: Mapping[Domain, NamedTensors],
    *,
    digest: Callable[[Domain], bytes],
    describe: Callable[[Domain], Description],
    problem: Exception | None = None,
) -> frozenset[str]:
    """Agree that all ranks can go on, and bring every gradient to its parameter's layout.

    Args:
        groups: Process groups.
        members: Parameters of each domain of this rank, by name; domains from the smallest on, so
            that what one of them learns reaches all that hold it.
        digest: What the ranks of a domain must have in common, hashed to `DIGEST_SIZE` bytes.
        describe: The same in words.
        problem: What keeps this rank from going on, if anything does.

    Returns:
        Names of the parameters that have no gradient on any rank.

    Modifies: gradients that are not in their parameter's layout.

    Raises:
        Exception: `problem`, or on the other ranks one that says the same; or a RuntimeError that
            names the first parameter about which ranks disagree.

    Collective: all ranks of each domain. Blocks: the host, until all of them have called.
    """
    codes, problem = ({}, problem) if problem else _own_codes(members)
    for domain, params in members.items():
        is_odd = any(codes.get(fqn, PRESENT) != PRESENT for fqn, _ in params)
        mine = bytes(DIGEST_SIZE) if problem else digest(domain)
        same, (has_failed, is_uneven) = agree(groups, domain, mine, [problem is not None, is_odd])
        if has_failed or not same:
            description = {} if problem else describe(domain)
            problem = _explained(groups, domain, description, problem)
        elif is_uneven:
            found, problem = _agreed_codes(groups, domain, params, codes)
            codes |= found
    if problem is not None:
        raise problem
    for params in members.values():
        for fqn, param in params:
            if codes[fqn] > PRESENT:
                reduce_(cast("DTensor", param), codes[fqn])
    return frozenset(fqn for fqn, code in codes.items() if code == ABSENT)


def _own_codes(
    members: Mapping[Domain, NamedTensors],
) -> tuple[dict[str, int], Exception | None]:
    """The code of each gradient of this rank, or what is wrong with one."""
    try:
        return {fqn: code_of(fqn, p) for params in members.values() for fqn, p in params}, None
    except Exception as error:  # noqa: BLE001 - every rank must hear of it
        return {}, error


def _explained(
    groups: Groups, domain: Domain, description: Description, problem: Exception | None
) -> Exception:
    """The problem that all ranks of a domain report: a rank's own, or where they differ."""
    text = None if problem is None else (type(problem).__name__, str(problem))
    said = gather(groups, domain, (text, description))
    answers = cast("dict[int, tuple[tuple[str, str] | None, Description]]", said)
    for error, _ in answers.values():
        if error is not None:
            # The same type everywhere, also where another rank cannot make this one.
            known = _ERRORS.get(error[0])
            same = known(error[1]) if known else RuntimeError(": ".join(error))
            same.__cause__ = problem
            return problem if known and problem else same
    return RuntimeError(first_difference({rank: found for rank, (_, found) in answers.items()}))


def _agreed_codes(
    groups: Groups, domain: Domain, params: NamedTensors, codes: Mapping[str, int]
) -> tuple[dict[str, int], Exception | None]:
    """The code of each gradient on the ranks that have it; where it is `Partial`, all must agree.

    What is wrong is the same on all ranks.
    """
    mine = [codes[fqn] for fqn, _ in params]
    # The least of those that are there, as the greatest complement.
    complements = [0 if code == ABSENT else 255 - code for code in mine]
    found = maxima(groups, domain, [*mine, *complements])
    agreed = dict(zip((fqn for fqn, _ in params), found, strict=False))
    for (fqn, high), complement in zip(agreed.items(), found[len(mine) :], strict=True):
        if high != ABSENT and high + complement != 255:
            return agreed, ValueError(
                f"{fqn}: its gradient has other placements on some ranks than on others, so it "
                "cannot be reduced; redistribute it to the parameter's placements on all of them"
            )
    return agreed, None
