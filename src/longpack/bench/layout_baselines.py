"""Layouts of other systems, written again from their descriptions, to compare with.

head_tail and per-document zigzag are layouts of longpack; here are the two that deal blocks.
"""

import heapq

import numpy as np

from longpack.packing import PackedRow
from longpack.plan import Pieces, Shards


def ptrr(row: PackedRow, world_size: int, block: int = 128) -> Shards:
    """Deal query blocks by how many key blocks each attends, in snake order.

    Blocks with most active key blocks come first; ranks take turns 0..P-1, P-1..0, and so on.
    """
    start = np.arange(0, row.length, block)
    stop = np.minimum(start + block, row.length)
    first_key = _document_starts(row, stop - 1)
    # a block of several documents attends from the start of its earliest one
    earliest = np.minimum(_document_starts(row, start), start)
    active = -(-stop // block) - np.minimum(first_key, earliest) // block
    order = np.argsort(-active, kind="stable")
    turn, place = np.divmod(np.arange(order.size), world_size)
    owner = np.empty(order.size, dtype=np.int64)
    owner[order] = np.where(turn % 2 == 0, place, world_size - 1 - place)
    return _fit(np.stack([start, stop, owner], axis=1), row, world_size)


def min_heap(row: PackedRow, world_size: int, chunk: int = 512) -> Shards:
    """Give chunks, largest area first, to the rank with least area that has chunks to take.

    Every rank takes equally many chunks, give or take one.
    """
    start = np.arange(0, row.length, chunk)
    stop = np.minimum(start + chunk, row.length)
    area = _area_of_chunks(row, start, world_size, chunk)
    most = -(-start.size // world_size)
    heap = [(0, rank) for rank in range(world_size)]
    count = [0] * world_size
    runs = []
    for at in np.argsort(-area, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        runs.append((start[at], stop[at], rank))
        count[rank] += 1
        if count[rank] < most:
            heapq.heappush(heap, (load + int(area[at]), rank))
    return _fit(np.array(runs, dtype=np.int64).reshape(-1, 3), row, world_size)


def _document_starts(row: PackedRow, rows: np.ndarray) -> np.ndarray:
    """Return the first row of the document of each row; padding attends nothing: itself."""
    bounds = row.bounds
    doc = np.searchsorted(bounds[:, 0], rows, side="right") - 1
    inside = (doc >= 0) & (rows < bounds[doc, 1]) if len(row) else np.zeros(rows.size, dtype=bool)
    return np.where(inside, bounds[doc, 0] if len(row) else rows, rows)


def _area_of_chunks(row: PackedRow, start: np.ndarray, world_size: int, chunk: int) -> np.ndarray:
    """Return each chunk's query-key pairs: as the area of ranks that own one chunk each."""
    alone = np.stack([start, start + chunk, np.arange(start.size)], axis=1)
    return Pieces.cut(row, Shards.from_runs(alone, start.size, row.length)).area


def _fit(table: np.ndarray, row: PackedRow, world_size: int) -> Shards:
    """Make ranks equal: where blocks do not divide evenly, cut the last runs of a rank short.

    Longer ranks give what is over an equal share back, and `from_runs` deals it to the others.
    """
    share = -(-row.length // world_size)
    table = table[np.lexsort((table[:, 0], table[:, 2]))]
    size = table[:, 1] - table[:, 0]
    before = np.cumsum(size) - size
    first = np.searchsorted(table[:, 2], np.arange(world_size))
    held = before - np.append(before, 0)[first][table[:, 2]]
    table[:, 1] = np.minimum(table[:, 1], table[:, 0] + np.maximum(share - held, 0))
    return Shards.from_runs(table, world_size, row.length)
