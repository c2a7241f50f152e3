"""The arguments of a varlen kernel: cumulative lengths, and gathers where rows are not packed."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from longpack.kernels.tiles import Bounds, Tile


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


@dataclass(frozen=True)
class Rows:
    """Name rows of a tensor: a range, read as a view, or the rows of `index`, int64, gathered."""

    start: int
    stop: int
    index: Tensor | None = None

    def read(self, x: Tensor) -> Tensor:
        """Return the rows of `x`."""
        return x[self.start : self.stop] if self.index is None else x.index_select(0, self.index)

    def write(self, x: Tensor, rows: Tensor) -> None:
        """Overwrite the rows of `x`, of which none may be named twice."""
        if self.index is None:
            x[self.start : self.stop].copy_(rows)
        else:
            x.index_copy_(0, self.index, rows.to(x.dtype))

    def add(self, x: Tensor, rows: Tensor) -> None:
        """Add to the rows of `x`; one that is named twice gets both."""
        if self.index is None:
            x[self.start : self.stop].add_(rows)
        else:
            x.index_add_(0, self.index, rows.to(x.dtype))


@dataclass(frozen=True)
class PackedTiles:
    """Hold one device's arguments of a varlen kernel that does the work of several tiles.

    Args:
        queries, keys: the rows of each sequence, one after another.
        cu_seqlens_q, cu_seqlens_k: int32, one more than sequences. None of them is empty: of an
            empty one, kernels return an lse that cannot be merged.
        causal: aligned at the bottom right; else queries see every key of their sequence.
        continues: earlier tiles have attended other keys with the same queries.
    """

    queries: Rows
    keys: Rows
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    continues: bool


class Tiles(tuple[Tile, ...]):
    """Several tiles, and the calls of a varlen kernel that do the same, built once a device."""

    @cached_property
    def _packed(self) -> dict[torch.device, tuple[PackedTiles, ...]]:
        return {}

    def packed(self, device: torch.device) -> tuple[PackedTiles, ...]:
        """Return the calls, those that continue last: one for each kind of tile there is.

        All tiles of a rank's own rows are of one kind, and so are all of one stage of arrivals.
        """
        if device not in self._packed:
            self._packed[device] = tuple(_pack_tiles(self, device))
        return self._packed[device]


def _pack_tiles(tiles: Tiles, device: torch.device) -> Iterator[PackedTiles]:
    for continues in (False, True):
        alike = [tile for tile in tiles if tile.continues == continues]
        squares = sorted(bounds for tile in alike if tile.causal for bounds in _bounds(tile))
        full = sorted(bounds for tile in alike if not tile.causal for bounds in _bounds(tile))
        if squares:  # a single query sees all its keys under a causal mask too: one call less
            single = [bounds for bounds in full if bounds[1] - bounds[0] == 1]
            full = [bounds for bounds in full if bounds[1] - bounds[0] > 1]
            squares = sorted(squares + single)
        for bounds, causal in ((full, False), (squares, True)):
            if bounds:
                yield _pack(bounds, causal, continues, device)


def _bounds(tile: Tile) -> Iterator[Bounds]:
    """Yield the bounds of each block of a tile."""
    queries, keys = tile.queries, tile.keys
    for q_start, k_start in zip(queries.starts, keys.starts, strict=True):
        yield q_start, q_start + queries.length, k_start, k_start + keys.length


def _pack(bounds: list[Bounds], causal: bool, continues: bool, device: torch.device) -> PackedTiles:
    queries = [(q_start, q_stop) for q_start, q_stop, _, _ in bounds]
    keys = [(k_start, k_stop) for _, _, k_start, k_stop in bounds]
    return PackedTiles(
        _rows(queries, device),
        _rows(keys, device),
        _cumulative(queries).to(device),
        _cumulative(keys).to(device),
        max(stop - start for start, stop in queries),
        max(stop - start for start, stop in keys),
        causal,
        continues,
    )


def _rows(ranges: list[tuple[int, int]], device: torch.device) -> Rows:
    start, stop = ranges[0][0], ranges[-1][1]
    if all(before[1] == after[0] for before, after in pairwise(ranges)):
        return Rows(start, stop)
    index = torch.cat([torch.arange(*each) for each in ranges])
    return Rows(start, stop, index.to(device))
