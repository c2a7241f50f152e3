"""Equal tokens, attention area within a tolerance, and few received rows."""

import math

import numpy as np

from longpack.errors import PlanError
from longpack.packing import PackedRow
from longpack.plan.layouts.fill import Run, fill
from longpack.plan.layouts.trade import trade_down
from longpack.plan.layouts.zigzag import zigzag
from longpack.plan.pieces import Pieces
from longpack.plan.shards import Ints, Shards
from longpack.plan.traffic import count_traffic

TOLERANCE = 1.05
# Which documents are long enough to be cut (their area in shares of a rank's mean), which share
# of the slots the shortest documents leave loose, and the share of first rows beside a cut: tried
# in this order, the best is kept.
_TRIALS = (
    (0.25, 0.03, 0.1),
    (0.12, 0.03, 0.1),
    (0.5, 0.03, 0.2),
    (0.9, 0.03, 0.1),
    (0.17, 0.03, 0.2),
    (0.4, 0.03, 0.1),
    (0.08, 0.03, 0.2),
    (0.05, 0.03, 0.1),
    (0.25, 0.1, 0.2),
    (0.9, 0.1, 0.0),
)
_MARGIN = 0.0005  # aimed below the limit, in shares of the mean area: loose rows vary
_BUSIEST = 0.2  # weight of the busiest rank's rows against the mean's
_WORK = 6_000  # documents and ranks handled over all trials: a budget that no clock decides
_TRADES = 400  # and two for each rank; most rows need fewer than half as many as ranks


def balanced(row: PackedRow, world_size: int, tolerance: float = TOLERANCE) -> Shards:
    """Give every rank equal tokens and at most `tolerance` times the mean attention area.

    A pure function of its arguments: every rank finds the same. Documents are cut anywhere.
    Fills the ranks by a greedy rule (`fill`) under several settings, keeps the one with fewest
    received rows, and trades rows between ranks where one is over the limit. Where no layout it
    finds is within the tolerance, the result is the most even one of these and `zigzag`.

    Args:
        row: the documents.
        world_size: ranks P.
        tolerance: most area of a rank over the mean, at least 1. What is above 1 is used to
            save traffic.
    """
    if not 1 <= tolerance < math.inf:
        raise PlanError(
            f"tolerance={tolerance} must be a number of at least 1: the largest area over the mean"
        )
    mean = row.area / world_size
    limit = int(min(tolerance * mean, row.area))  # no rank has more than all
    if world_size == 1 or not len(row):
        return Shards.from_runs([], world_size, row.length)
    best = _best_fill(row, world_size, mean, limit)
    best = trade_down(row, best, limit, _TRADES + 2 * world_size)
    if _area(row, best) <= limit:
        return best
    other = zigzag(row, world_size)
    return min(best, other, key=lambda shards: _area(row, shards))


def why_uneven(row: PackedRow, shards: Shards, tolerance: float) -> str | None:
    """Say why the largest area is over the tolerance; None where it is not."""
    mean = row.area / shards.world_size
    largest = _area(row, shards)
    if not len(row) or largest <= tolerance * mean:
        return None
    found = f"the largest area is {largest / mean:.3f} times the mean, above {tolerance}"
    longest = max(row.lengths)
    if longest > tolerance * mean:
        return (
            f"{found}: no layout can do better than {longest / mean:.3f}, since the last token of "
            f"the longest document attends {longest} rows and the mean area is {mean:.1f}"
        )
    return f"{found}: no layout within it was found; use fewer ranks or a larger tolerance"


def _best_fill(row: PackedRow, world_size: int, mean: float, limit: int) -> Shards:
    """Return the fill with fewest received rows, over the limit counting against it."""
    lengths = row.bounds[:, 1] - row.bounds[:, 0]
    order = np.argsort(-lengths, kind="stable")
    starts, lengths = row.bounds[order, 0], lengths[order]
    area = lengths * (lengths + 1) // 2
    local_length = -(-row.length // world_size)
    aim = limit - int(_MARGIN * mean)
    trials = max(2, _WORK // (len(row) + 4 * world_size))
    found = {}
    for threshold, loose, early in _TRIALS[:trials]:
        num_long = int(np.searchsorted(-area, -threshold * mean))
        if (num_long, loose, early) not in found:
            runs = fill(lengths.tolist(), world_size, local_length, aim, num_long, loose, early)
            table = _table(runs, starts)
            found[num_long, loose, early] = Shards.from_runs(table, world_size, row.length)
    return min(found.values(), key=lambda shards: _cost(row, shards, mean, limit))


def _table(runs: list[Run], starts: Ints) -> Ints:
    """Return runs of documents as runs of the row, `[N, 3]`."""
    doc, start, stop, rank = np.array(runs, dtype=np.int64).reshape(-1, 4).T
    return np.stack([starts[doc] + start, starts[doc] + stop, rank], axis=1)


def _cost(row: PackedRow, shards: Shards, mean: float, limit: int) -> float:
    """Return received rows of all ranks, plus what trading down to the limit is likely to add.

    The busiest rank counts a little for all, so that of layouts with like traffic the one that
    spreads it is kept.
    """
    pieces = Pieces.cut(row, shards)
    traffic = count_traffic("a2a", shards, pieces, shards.world_size)
    rows = traffic.received_near.sum() + _BUSIEST * shards.world_size * traffic.near.max()
    over = np.maximum(pieces.area - limit, 0) / mean
    return rows + shards.local_length * (10 * over.sum() + 2 * np.count_nonzero(over))


def _area(row: PackedRow, shards: Shards) -> int:
    return int(Pieces.cut(row, shards).area.max())
