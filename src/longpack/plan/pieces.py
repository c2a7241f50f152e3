"""Pieces: the documents of a row cut by the shards, and what each rank needs of them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from longpack.packing import PackedRow
from longpack.plan.shards import Ints, Shards, order_by_rank, sorted_edges


@dataclass(frozen=True, eq=False)
class Pieces:
    """Every maximal stretch of rows that lies in one document on one rank, ascending.

    A piece is one query segment of its rank: its rows attend to their document from its start
    through themselves. So the K/V that a rank needs is, for each document it touches, the rows
    from the document's start to the end of the rank's last piece of it: `Needs`.

    Args:
        start, stop: int64 `[N]`, rows.
        owner: int64 `[N]`, the rank.
        doc: int64 `[N]`, index into `row.documents`.
        doc_start: int64 `[N]`, first row of that document.
        local_start: int64 `[N]`, local row of the first row on its owner.
    """

    start: Ints
    stop: Ints
    owner: Ints
    doc: Ints
    doc_start: Ints
    local_start: Ints
    world_size: int

    @classmethod
    def cut(cls, row: PackedRow, shards: Shards) -> Self:
        """Cut the documents at the edges of the shards."""
        bounds = row.bounds
        edges = sorted_edges(shards.start, bounds.reshape(-1))
        start, stop = edges, np.append(edges[1:], shards.world_size * shards.local_length)
        doc = np.searchsorted(bounds[:, 0], start, side="right") - 1
        real = doc >= 0
        real[real] = start[real] < bounds[doc[real], 1]
        start, stop, doc = start[real], stop[real], doc[real]
        run = np.searchsorted(shards.start, start, side="right") - 1
        return cls(
            start,
            stop,
            shards.owner[run],
            doc,
            bounds[doc, 0] if doc.size else doc,
            shards.local_start[run] + start - shards.start[run],
            shards.world_size,
        )

    @cached_property
    def area(self) -> Ints:
        """Query-key pairs per rank: n rows after p earlier ones make n*p + n(n+1)/2."""
        n, p = self.stop - self.start, self.start - self.doc_start
        return _sum_by(self.owner, n * p + n * (n + 1) // 2, self.world_size)

    @cached_property
    def tokens(self) -> Ints:
        """Real rows per rank."""
        return _sum_by(self.owner, self.stop - self.start, self.world_size)

    @cached_property
    def count(self) -> Ints:
        """Query segments per rank."""
        return np.bincount(self.owner, minlength=self.world_size)

    @cached_property
    def needs(self) -> tuple[Ints, Ints, Ints, Ints]:
        """What ranks need, one entry per (rank, document) touched: rank, doc, start, stop.

        Sorted by rank, then document; `[start, stop)` runs from the document's start to the end
        of the rank's last piece.
        """
        order = order_by_rank(self.owner, self.world_size)
        rank, doc = self.owner[order], self.doc[order]
        last = np.ones(order.size, dtype=bool)
        last[:-1] = (rank[1:] != rank[:-1]) | (doc[1:] != doc[:-1])
        at = order[last]
        return self.owner[at], self.doc[at], self.doc_start[at], self.stop[at]

    @cached_property
    def needed(self) -> Ints:
        """Rows of K/V that each rank needs, its own among them: the union of its segments' keys."""
        rank, _, start, stop = self.needs
        return _sum_by(rank, stop - start, self.world_size)


def _sum_by(rank: Ints, values: Ints, world_size: int) -> Ints:
    """Sum integers per rank, exactly (bincount's weights would round past 2**53)."""
    out = np.zeros(world_size, dtype=np.int64)
    np.add.at(out, rank, values)
    return out
