"""Trade rows between ranks, as many each way, until none has more area than a limit."""

import heapq
import math
from typing import NamedTuple

from longpack.packing import PackedRow
from longpack.plan.layouts.fill import area_of
from longpack.plan.pieces import Pieces
from longpack.plan.shards import Shards

_LIGHT = 4  # lightest ranks that are asked
_OFFERS = 4  # runs of each rank that are considered
_FIXED_COST = 200  # rows: what one more segment and transfer is taken to cost

Span = tuple[int, int, int]  # document, start and stop inside it; document -1 is padding


class Trade(NamedTuple):
    """The heavy rank gives the last rows of `given` for as many first rows of `taken`."""

    light: int
    given: Span
    taken: Span
    rows: int


def trade_down(row: PackedRow, shards: Shards, limit: int, steps: int) -> Shards:
    """Bring every rank's area to at most `limit` where `steps` trades can.

    The heaviest rank trades with one of the lightest, late rows for early ones or for padding,
    so that tokens stay equal and one of the two is at the limit afterwards; of the possible
    trades the one with fewest added received rows per area moved.

    Args:
        row: the documents.
        shards: a layout of them.
        limit: area, in query-key pairs.
        steps: most trades.
    """
    state = _State(row, shards)
    for _ in range(steps):
        heavy = max(range(shards.world_size), key=state.area.__getitem__)
        trade = state.best_trade(heavy, limit) if state.area[heavy] > limit else None
        if trade is None:
            break
        state.apply(heavy, trade)
    return state.shards()


class _State:
    """Runs, area and padding rows of every rank while trades go on."""

    def __init__(self, row: PackedRow, shards: Shards) -> None:
        pieces = Pieces.cut(row, shards)
        self.row, self.before, self.traded = row, shards, False
        self.spans: list[list[Span]] = [[] for _ in range(shards.world_size)]
        starts = (pieces.start - pieces.doc_start).tolist()
        stops = (pieces.stop - pieces.doc_start).tolist()
        for doc, owner, start, stop in zip(
            pieces.doc.tolist(), pieces.owner.tolist(), starts, stops, strict=True
        ):
            self.spans[owner].append((doc, start, stop))
        self.area = pieces.area.tolist()
        self.padding = (shards.local_length - pieces.tokens).tolist()

    def best_trade(self, heavy: int, limit: int) -> Trade | None:
        """Return the trade with fewest added received rows per area moved, if one helps."""
        offers = heapq.nlargest(_OFFERS, self.spans[heavy], key=lambda span: span[2])
        over = self.area[heavy] - limit
        best, least = None, math.inf
        for light in heapq.nsmallest(_LIGHT, range(len(self.area)), key=self.area.__getitem__):
            gap, free = self.area[heavy] - self.area[light], limit - self.area[light]
            goal = min(over, free) if free > 0 else gap // 2
            returns = heapq.nlargest(_OFFERS, self.spans[light], key=lambda s: s[2] - 2 * s[1])
            if self.padding[light]:
                returns.append((-1, 0, self.padding[light]))
            for given in offers:
                for taken in returns:
                    rows = _rows_to_trade(given, taken, goal)
                    moved = _area_moved(given, taken, rows)
                    if not 0 < moved < gap:
                        continue
                    trade = Trade(light, given, taken, rows)
                    cost = (self._added(heavy, trade) + _FIXED_COST) / min(moved, goal)
                    if cost < least:
                        best, least = trade, cost
        return best

    def apply(self, heavy: int, trade: Trade) -> None:
        """Make a trade."""
        moved = _area_moved(trade.given, trade.taken, trade.rows)
        self.spans[heavy], self.spans[trade.light] = self._after(heavy, trade)
        self.area[heavy] -= moved
        self.area[trade.light] += moved
        if trade.taken[0] < 0:
            self.padding[heavy] += trade.rows
            self.padding[trade.light] -= trade.rows
        self.traded = True

    def shards(self) -> Shards:
        """Return the layout that the trades made."""
        if not self.traded:
            return self.before
        first = self.row.bounds[:, 0].tolist()
        return Shards.from_runs(
            (
                (first[doc] + start, first[doc] + stop, rank)
                for rank, spans in enumerate(self.spans)
                for doc, start, stop in spans
            ),
            self.before.world_size,
            self.row.length,
        )

    def _after(self, heavy: int, trade: Trade) -> tuple[list[Span], list[Span]]:
        """Return the spans of the two ranks after a trade."""
        light, given, taken, rows = trade
        doc, start, stop = given
        heavies = [s for s in self.spans[heavy] if s != given] + [(doc, start, stop - rows)]
        lights = [s for s in self.spans[light] if s != taken] + [(doc, stop - rows, stop)]
        doc, start, stop = taken
        if doc >= 0:
            heavies.append((doc, start, start + rows))
            lights.append((doc, start + rows, stop))
        return [s for s in heavies if s[1] < s[2]], [s for s in lights if s[1] < s[2]]

    def _added(self, heavy: int, trade: Trade) -> int:
        """Return the rows that the two ranks receive more: by how much their needs reach later."""
        docs = {trade.given[0], trade.taken[0]}
        before = (self.spans[heavy], self.spans[trade.light])
        after = self._after(heavy, trade)
        return sum(_reach(spans, docs) for spans in after) - sum(_reach(s, docs) for s in before)


def _reach(spans: list[Span], docs: set[int]) -> int:
    """Return the rows that a rank needs of these documents."""
    last: dict[int, int] = {}
    for doc, _, stop in spans:
        if doc in docs and stop > last.get(doc, 0):
            last[doc] = stop
    return sum(last.values())


def _rows_to_trade(given: Span, taken: Span, goal: int) -> int:
    """Return the rows m whose trade moves `goal` query-key pairs, or as many as the spans allow.

    m last rows up to y have area m*y - m*(m-1)/2, m first rows from q have m*q + m*(m+1)/2.
    """
    most = min(given[2] - given[1], taken[2] - taken[1])
    if taken[0] < 0:
        reach, curve = given[2] + 0.5, 0.5
    else:
        reach, curve = float(given[2] - taken[1]), 1.0
        most = min(most, max(1, given[2] - taken[1]) // 2 + 1)
    discriminant = reach * reach - 4 * curve * goal
    if reach <= 0 or discriminant <= 0:
        return most
    return min(most, max(1, math.ceil((reach - math.sqrt(discriminant)) / (2 * curve))))


def _area_moved(given: Span, taken: Span, rows: int) -> int:
    """Return the query-key pairs by which a trade relieves the giver."""
    back = 0 if taken[0] < 0 else area_of(taken[1], taken[1] + rows)
    return area_of(given[2] - rows, given[2]) - back
