"""Make one plan on every rank, or an error on every rank."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from longpack.collectives import Transport, are_equal, collect_votes
from longpack.errors import AgreementError, LongpackError, rank_prefix
from longpack.packing import PackedRow, first_difference
from longpack.plan import Plan

COMPARED = ("input_ids", "labels", "shift_labels")

Summary = tuple[str, str, PackedRow, dict[str, int]]  # layout, exchange, documents, checksums


def agree_on_plan(
    make_plan: Callable[[], Plan],
    batch: Mapping[str, Any],
    transport: Transport,
    check: bool | None,
    first: bool,
) -> Plan:
    """Return this rank's plan, having compared it and the tokens with the other ranks' where asked.

    The first time ranks exchange what they hold, later only a digest of it, unless those differ.

    Args:
        make_plan: makes this rank's plan; its errors are told to the other ranks first.
        batch: that `make_plan` has checked; its tokens and labels on the host are compared too.
        transport: the cp axis.
        check: True to compare now, False not to, None to compare where no device has to wait for
            it, and on the axis's first batch.
        first: this is that batch.

    Raises:
        AgreementError: on every rank, naming the first difference, or the rank that could not
            make its plan and why (that rank raises its own error).
    """
    free = first or transport.moves_host_tensors
    if transport.world_size == 1 or check is False or (check is None and not free):
        return make_plan()
    transport.enter("agreement on the batch")
    plan, error = _try(make_plan)
    sums = {} if plan is None else _checksums(batch)
    by_digest = not first and transport.moves_host_tensors
    if by_digest and are_equal(transport, _digest(plan, sums)) and plan is not None:
        return plan
    summary = None if plan is None else (plan.layout, plan.kv_exchange, plan.row, sums)
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
    difference = _difference([vote.value for vote in votes if vote.value is not None])
    if difference is not None:
        raise AgreementError(
            f"{prefix}ranks hold different batches: {difference}. Every rank of the cp axis must "
            "pass the same batch and options; check that the data loader gives cp ranks of one "
            "replica the same row"
        )
    return plan


def _try(make_plan: Callable[[], Plan]) -> tuple[Plan | None, ValueError | LongpackError | None]:
    try:
        return make_plan(), None
    except (ValueError, LongpackError) as error:  # knobs raise a plain ValueError
        return None, error


def _checksums(batch: Mapping[str, Any]) -> dict[str, int]:
    found = {key: batch.get(key) for key in COMPARED}
    return {
        key: zlib.crc32(x.contiguous().numpy().data)
        for key, x in found.items()
        if isinstance(x, torch.Tensor) and x.device.type == "cpu"
    }


def _digest(plan: Plan | None, sums: dict[str, int]) -> bytes:
    """Return 12 bytes that say what this rank holds; zeros where it holds nothing."""
    if plan is None:
        return bytes(12)
    tokens = zlib.crc32(repr(sorted(sums.items())).encode())
    return bytes.fromhex(plan.digest) + tokens.to_bytes(4, "big")


def _difference(summaries: list[Summary]) -> str | None:
    """Name the first thing that two ranks hold differently, None where all is the same."""
    layout, exchange, _, sums = summaries[0]
    for rank, (their_layout, their_exchange, _, _) in enumerate(summaries):
        if their_layout != layout:
            return f"layout is {layout} on rank 0 and {their_layout} on rank {rank}"
        if their_exchange != exchange:
            return f"kv_exchange is {exchange} on rank 0 and {their_exchange} on rank {rank}"
    found = first_difference([row for _, _, row, _ in summaries])
    if found:
        return f"numbering ranks, {found}"
    for rank, (*_, theirs) in enumerate(summaries):
        other = [key for key in sums | theirs if sums.get(key) != theirs.get(key)]
        if other:
            names = ", ".join(other)
            return f"documents are alike, but {names} of rank {rank} and of rank 0 are not"
    return None
