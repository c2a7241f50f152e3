"""Make one plan on every rank, or an error on every rank."""

from collections.abc import Callable

from longpack.collectives import Transport, collect_votes, first_meeting
from longpack.errors import AgreementError, LongpackError, rank_prefix
from longpack.packing import PackedRow, first_difference
from longpack.plan import Plan


def agree_on_plan(make_plan: Callable[[], Plan], transport: Transport, check: bool | None) -> Plan:
    """Return this rank's plan, having compared it with the other ranks' where asked.

    Args:
        make_plan: makes this rank's plan; its errors are told to the other ranks first.
        transport: the cp axis.
        check: True to compare now, False not to, None to compare on the axis's first step.

    Raises:
        AgreementError: on every rank, naming the first difference, or the rank that could not
            make its plan and why (that rank raises its own error).
    """
    fresh = first_meeting(transport)  # remembered whatever `check` says
    if transport.world_size == 1 or check is False or (check is None and not fresh):
        return make_plan()
    plan: Plan | None = None
    error: ValueError | LongpackError | None = None
    try:
        plan = make_plan()
    except (ValueError, LongpackError) as raised:  # knobs raise a plain ValueError
        error = raised
    summary = None if plan is None else (plan.digest, plan.layout, plan.kv_exchange, plan.row)
    votes = collect_votes(transport, summary, None if error is None else str(error))
    if error is not None:
        raise error
    assert plan is not None
    prefix = rank_prefix(transport.rank, transport.world_size)
    for rank, vote in enumerate(votes):
        if vote.failure is not None:
            raise AgreementError(
                f"{prefix}rank {rank} could not plan this step, so no rank runs it: {vote.failure}"
            )
    summaries = [vote.value for vote in votes if vote.value is not None]
    if len({digest for digest, *_ in summaries}) > 1:
        raise AgreementError(
            f"{prefix}ranks hold different plans (digests "
            f"{', '.join(digest for digest, *_ in summaries)}): {_difference(summaries)}. Every "
            "rank of the cp axis must pass the same batch and options; check that the data loader "
            "gives cp ranks of one replica the same row"
        )
    return plan


def _difference(summaries: list[tuple[str, str, str, PackedRow]]) -> str:
    """Name the first thing that two ranks' plans differ in."""
    _, *base = summaries[0]
    for rank, (_, *other) in enumerate(summaries):
        for name, ours, theirs in zip(("layout", "kv_exchange"), base, other, strict=False):
            if ours != theirs:
                return f"{name} is {ours} on rank 0 and {theirs} on rank {rank}"
    found = first_difference([row for *_, row in summaries])
    return f"numbering ranks, {found}" if found else "the same documents were split differently"
