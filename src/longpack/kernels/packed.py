"""The arguments of a varlen kernel: cumulative lengths, and gathers where rows are not packed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from longpack.kernels.tiles import Bounds


@dataclass(frozen=True)
class PackedIndex:
    """Hold one device's arguments of a varlen kernel.

    `query_index` and `key_index` (int64) gather the packed rows; None means that the rows are
    packed already. Keys that several segments share are gathered once per segment.
    `cu_seqlens_q` and `cu_seqlens_k` are int32 of len(bounds) + 1.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    query_index: Tensor | None
    key_index: Tensor | None


def pack_bounds(
    bounds: tuple[Bounds, ...], num_queries: int, num_keys: int, device: torch.device
) -> PackedIndex:
    """Build the arguments of a varlen kernel for the segments `bounds`, on one device."""
    queries = [(q_start, q_stop) for q_start, q_stop, _, _ in bounds]
    keys = [(k_start, k_stop) for _, _, k_start, k_stop in bounds]
    return PackedIndex(
        _cumulative(queries).to(device),
        _cumulative(keys).to(device),
        max((stop - start for start, stop in queries), default=0),
        max((stop - start for start, stop in keys), default=0),
        _gather(queries, num_queries, device),
        _gather(keys, num_keys, device),
    )


def _cumulative(ranges: list[tuple[int, int]]) -> Tensor:
    lengths = torch.tensor([0, *(stop - start for start, stop in ranges)])
    return lengths.cumsum(0).to(torch.int32)


def _gather(ranges: list[tuple[int, int]], rows: int, device: torch.device) -> Tensor | None:
    edges = [0, *(row for start_stop in ranges for row in start_stop), rows]
    if edges[::2] == edges[1::2]:  # each range starts where the one before it stopped
        return None
    if not ranges:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([torch.arange(start, stop) for start, stop in ranges]).to(device)
