"""Next-token targets of packed rows, shifted before the row is split."""

from collections.abc import Iterable
from typing import Any

import torch

from longpack.collectives import Transport
from longpack.errors import PackingError
from longpack.packing import PackedRow

SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
IGNORE = -100  # the target that cross-entropy leaves out, everywhere in this field


def check_labels(labels: Any, name: str = "labels") -> None:
    """Refuse what cannot be labels.

    Raises:
        PackingError: not a strided tensor with data, or a dtype that cannot hold -100.
    """
    tensor = isinstance(labels, torch.Tensor)
    if not tensor or labels.is_nested or labels.layout is not torch.strided or labels.is_meta:
        shown = f"on {labels.device}, {labels.layout}" if tensor else type(labels).__name__
        raise PackingError(f"{name} are {shown}; pass a strided tensor with data")
    if labels.dtype not in SIGNED:
        raise PackingError(
            f"{name} are {labels.dtype}; pass signed integers, {IGNORE} where there is no target"
        )


def next_token_targets(labels: torch.Tensor, row: PackedRow) -> torch.Tensor:
    """Return for each row the label of the next row of its document, or -100.

    target[i] = labels[i + 1] where rows i and i + 1 lie in one document, else -100. Labels that
    are -100 stay so. Shift before sharding: the target of a shard's last row is on another rank.

    Args:
        labels: integers `[S]` of the whole row, label i being the token of row i or -100.
        row: the documents; `row.length` is S.

    Returns:
        `[S]`, of the dtype and device of `labels`.

    Raises:
        PackingError: labels of another shape, or that are not signed integers with data.
    """
    check_labels(labels)
    if labels.shape != (row.length,):
        raise PackingError(
            f"labels have shape {tuple(labels.shape)} but the row has {row.length} tokens: pass "
            "one label per token, flattened"
        )
    targets = torch.full_like(labels, IGNORE)
    targets[:-1] = labels[1:]
    inside = torch.zeros(row.length, dtype=torch.bool)
    for start, stop in row.documents:
        inside[start : stop - 1] = True
    return targets.masked_fill_(~inside.to(labels.device), IGNORE)


def count_targets(targets: torch.Tensor, others: Iterable[Transport] = ()) -> int:
    """Count the targets of the whole step: the number that every rank's loss is divided by.

    Every cp rank holds the whole row's targets here, so the cp axis needs no collective; each
    transport in `others` (dp, say) adds the counts of that axis.

    Args:
        targets: integers of the whole row, -100 where there is none.
        others: axes whose ranks hold other rows. All their ranks call this together.

    Returns:
        At least 1, so that a step without a target has loss 0 and not 0 / 0.

    Raises:
        PackingError: targets that are not signed integers with data.
    """
    check_labels(targets, "targets")
    count = int((targets != IGNORE).sum())
    for transport in others:
        count = sum(transport.all_gather_object(count))
    return max(count, 1)
