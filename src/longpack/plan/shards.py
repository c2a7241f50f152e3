"""Shards: which rank holds which rows of the packed row."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from longpack.errors import PlanError

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shards:
    """A partition of the padded row over ranks, every rank with equally many rows.

    Rank r holds the runs `[start, stop)` whose `owner` is r, in ascending order; its local row
    i is the i-th row of those runs. Runs of one rank never touch, so a partition has one form.

    Args:
        world_size: ranks P.
        local_length: rows per rank; the padded row has P * local_length rows.
        start, stop, owner: int64 `[N]`, runs in ascending order of rows, tiling the padded row.
    """

    world_size: int
    local_length: int
    start: Ints
    stop: Ints
    owner: Ints

    @classmethod
    def from_runs(
        cls, runs: Iterable[tuple[int, int, int]] | Ints, world_size: int, tokens: int
    ) -> Self:
        """Build from `(start, stop, owner)` runs, handing out the rest so that ranks are equal.

        Rows below `tokens` that no run covers, and as many rows past the end as it takes, go as
        padding to the ranks that are short, ascending rows to ascending ranks.

        Args:
            runs: disjoint runs, in any order.
            world_size: ranks P.
            tokens: rows of the packed row before padding for this partition.
        """
        rows = runs if isinstance(runs, np.ndarray) else list(runs)
        table = np.asarray(rows, dtype=np.int64).reshape(-1, 3)
        table = table[table[:, 0] < table[:, 1]]
        table = table[np.argsort(table[:, 0], kind="stable")]
        held = np.bincount(
            table[:, 2], weights=table[:, 1] - table[:, 0], minlength=world_size
        ).astype(np.int64)
        local_length = max(int(held.max(initial=0)), -(-tokens // world_size))
        free = _gaps(table, world_size * local_length)
        fill = _deal(free, local_length - held)
        table = np.concatenate([table, fill])
        table = table[np.argsort(table[:, 0], kind="stable")]
        return cls(world_size, local_length, *_merge(table))

    @cached_property
    def by_rank(self) -> tuple[Ints, Ints]:
        """Run numbers sorted by rank then row, and the offset of each rank's first, `[P+1]`."""
        order = order_by_rank(self.owner, self.world_size)
        return order, np.searchsorted(self.owner[order], np.arange(self.world_size + 1))

    @cached_property
    def local_start(self) -> Ints:
        """The local row, on its owner, of each run's first row, `[N]`."""
        order, _ = self.by_rank
        sizes = (self.stop - self.start)[order]
        before = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        out = np.empty_like(before)
        out[order] = before - self.owner[order] * self.local_length
        return out

    def runs(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The `(start, stop)` runs of one rank, ascending."""
        mine = self._numbers(rank)
        return tuple(zip(self.start[mine].tolist(), self.stop[mine].tolist(), strict=True))

    def rows(self, rank: int) -> Ints:
        """The rows of one rank in local order, `[local_length]`."""
        mine = self._numbers(rank)
        return expand(self.start[mine], self.stop[mine])

    def _numbers(self, rank: int) -> Ints:
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} is not one of the {self.world_size} ranks of this plan")
        order, first = self.by_rank
        return order[first[rank] : first[rank + 1]]


def order_by_rank(owner: Ints, world_size: int) -> Ints:
    """Return the order that sorts by rank and keeps the order within one.

    numpy sorts 16-bit integers by radix: for millions of runs, ten times faster than int64.
    """
    small = owner.astype(np.uint16) if world_size <= 1 << 16 else owner
    return np.argsort(small, kind="stable")


def sorted_edges(*edges: Ints) -> Ints:
    """Return the distinct values of arrays that are each sorted, in one merge."""
    merged = np.sort(np.concatenate(edges), kind="stable")
    keep = np.ones(merged.size, dtype=bool)
    keep[1:] = merged[1:] != merged[:-1]
    return merged[keep]


def expand(start: Ints, stop: Ints) -> Ints:
    """Return all rows of the runs `[start, stop)`, in order."""
    sizes = stop - start
    ends = np.cumsum(sizes)
    rows = np.arange(int(ends[-1]) if ends.size else 0, dtype=np.int64)
    return rows + np.repeat(start - (ends - sizes), sizes)


def _gaps(table: Ints, length: int) -> Ints:
    """Return the `[start, stop)` stretches of `[0, length)` that no run covers."""
    start = np.concatenate([[0], table[:, 1]])
    stop = np.concatenate([table[:, 0], [length]])
    if (start > stop).any():
        at = int(np.argmax(start > stop))
        raise PlanError(
            f"a run ends at row {start[at]}, past row {stop[at]} where the next begins or the "
            "padded row ends: a layout's runs must be disjoint"
        )
    keep = start < stop
    return np.stack([start[keep], stop[keep]], axis=1)


def _deal(free: Ints, short: Ints) -> Ints:
    """Give the free stretches to ranks that are short of rows, cutting where a rank is full."""
    before = np.concatenate([[0], np.cumsum(free[:, 1] - free[:, 0])])
    edges = sorted_edges(before, np.cumsum(short))
    begin, end = edges[:-1], edges[1:]
    stretch = np.searchsorted(before, begin, side="right") - 1
    start = free[stretch, 0] + begin - before[stretch] if begin.size else begin
    owner = np.searchsorted(np.cumsum(short), begin, side="right")
    return np.stack([start, start + end - begin, owner], axis=1)


def _merge(table: Ints) -> tuple[Ints, Ints, Ints]:
    """Join neighbouring runs of one rank."""
    fresh = np.ones(len(table), dtype=bool)
    fresh[1:] = table[1:, 2] != table[:-1, 2]
    final = np.ones(len(table), dtype=bool)
    final[:-1] = fresh[1:]
    first, last = np.flatnonzero(fresh), np.flatnonzero(final)
    columns = (table[first, 0], table[last, 1], table[first, 2])
    for column in columns:
        column.flags.writeable = False
    return columns
