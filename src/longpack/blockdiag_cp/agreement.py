"""Make one plan on every rank, or an error on every rank."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from longpack.collectives import Transport, are_equal, collect_votes
from longpack.errors import AgreementError, LongpackError, rank_prefix
from longpack.packing import PackedRow, first_difference
from longpack.plan import Plan

COMPARED = ("input_ids", "labels", "shift_labels")


@dataclass(frozen=True)
class _Held:
    """What one rank is about to run, as the others hear of it."""

    options: dict[str, Any]
    row: PackedRow
    sums: dict[str, int]
    digest: str


def agree_on_plan(
    make_plan: Callable[[], Plan],
    transport: Transport,
    check: bool | None,
    *,
    batch: Mapping[str, Any] = MappingProxyType({}),
    first: bool = True,
    stages: int | None = None,
) -> Plan:
    """Return this rank's plan, having compared it and the tokens with the other ranks' where asked.

    The first time ranks exchange what they hold, later only a digest of it, unless those differ.

    Args:
        make_plan: makes this rank's plan; its errors are told to the other ranks first.
        transport: the cp axis.
        check: True to compare now, False not to, None to compare where no device has to wait for
            it, and on the axis's first batch.
        batch: that `make_plan` has checked; its tokens and labels are compared too, later than
            the first time only where they are on the host.
        first: this is the axis's first batch.
        stages: as asked for; must be alike too.

    Raises:
        AgreementError: on every rank, naming the first difference, or the rank that could not
            make its plan and why (that rank raises its own error).
    """
    free = first or transport.moves_host_tensors
    if transport.world_size == 1 or check is False or (check is None and not free):
        return make_plan()
    transport.enter("agreement on the batch")
    plan, error = _try(make_plan)
    by_digest = not first and check is None
    held = None if plan is None else _hold(plan, batch, stages, host_only=by_digest)
    if by_digest and are_equal(transport, _digest(held)) and plan is not None:
        return plan
    votes = collect_votes(transport, held, None if error is None else str(error))
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


def _hold(plan: Plan, batch: Mapping[str, Any], stages: int | None, host_only: bool) -> _Held:
    tensors = {key: batch[key] for key in COMPARED if isinstance(batch.get(key), torch.Tensor)}
    sums = {
        key: zlib.crc32(x.cpu().contiguous().numpy().data)
        for key, x in tensors.items()
        if not (x.is_meta or (host_only and x.device.type != "cpu"))
    }
    options = {"layout": plan.layout, "kv_exchange": plan.kv_exchange, "stages": stages}
    return _Held(options, plan.row, sums, plan.digest)


def _digest(held: _Held | None) -> bytes:
    """Return 12 bytes that say what this rank holds; zeros where it holds nothing."""
    if held is None:
        return bytes(12)
    rest = zlib.crc32(repr((sorted(held.options.items()), sorted(held.sums.items()))).encode())
    return bytes.fromhex(held.digest) + rest.to_bytes(4, "big")


def _difference(ranks: list[_Held]) -> str | None:
    """Name the first thing that two ranks hold differently, None where all is the same."""
    base = ranks[0]
    for rank, theirs in enumerate(ranks):
        for name, value in base.options.items():
            if theirs.options[name] != value:
                return f"{name} is {value} on rank 0 and {theirs.options[name]} on rank {rank}"
    found = first_difference([held.row for held in ranks])
    if found:
        return f"numbering ranks, {found}"
    for rank, theirs in enumerate(ranks):
        if theirs.digest != base.digest:
            return (
                f"the same documents are split differently on rank 0 and rank {rank}: their "
                "versions of longpack differ, or the layout is not the same in every call"
            )
        other = [k for k in base.sums | theirs.sums if base.sums.get(k) != theirs.sums.get(k)]
        if other:
            names = ", ".join(other)
            return f"documents are alike, but {names} of rank {rank} and of rank 0 are not"
    return None
