"""Fill ranks with documents: long ones cut from their ends, short ones whole.

A rank that holds positions [x, y) of a document receives the rows before x that it does not hold.
So one more rank on a document costs, in received rows, the position where it is cut: a cut near
the document's start is cheap. And a late position attends more keys than an early one, so a rank
reaches its area in few rows when they come from a document's end. Both say the same: give a rank
as much of the end of the longest document as its area allows, and fill its other slots with what
attends least, short documents, whole. A share of those slots takes first rows of the document that
is cut: every rank on it needs them anyway, and one rank that held them all would send them to each.
"""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

_PATIENCE = 16  # ranks looked at for one that has room, before a document is cut or left over


class Run(NamedTuple):
    """Positions `[start, stop)` of a document, on one rank."""

    doc: int
    start: int
    stop: int
    rank: int


class Cut(NamedTuple):
    """One rank's part of a long document, of which positions `[start, stop)` were left.

    It takes `early` positions from `start` on and `late` positions up to `stop`.
    """

    doc: int
    rank: int
    start: int
    stop: int
    early: int
    late: int

    @property
    def is_rest(self) -> bool:
        """Whether it takes all that was left."""
        return self.early + self.late == self.stop - self.start


def area_of(start: int, stop: int) -> int:
    """Return the query-key pairs of positions `[start, stop)` of a document."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


@dataclass
class Room:
    """What is left on every rank: slots in tokens, budget in query-key pairs."""

    slots: list[int]
    budget: list[int]

    def take(self, cut: Cut, sign: int = 1) -> None:
        """Take a cut's rows out of its rank's room; with sign -1, give them back."""
        h, e, early, late = cut.start, cut.stop, cut.early, cut.late
        self.slots[cut.rank] -= sign * (early + late)
        self.budget[cut.rank] -= sign * (area_of(h, h + early) + area_of(e - late, e))

    def left(self) -> list[tuple[int, int, int]]:
        """Return `(budget, slots, rank)` of the ranks that have slots."""
        ranks = range(len(self.slots))
        return [row for row in zip(self.budget, self.slots, ranks, strict=True) if row[1]]

    def by_spare(self, density: float) -> list[tuple[float, int]]:
        """Return `(spare budget, rank)`, ascending: budget beyond filling slots at `density`."""
        return sorted((b - density * s, r) for b, s, r in self.left())


@dataclass
class Filler:
    """Rows that fill slots after the long documents: short documents and padding."""

    tokens: int
    area: int

    @property
    def density(self) -> float:
        """Mean query-key pairs of a row."""
        return self.area / self.tokens if self.tokens else 0.0


def fill(
    lengths: list[int],
    world_size: int,
    local_length: int,
    limit: int,
    num_long: int,
    loose: float,
    early: float,
) -> list[Run]:
    """Return who holds which positions of which document; what it leaves out fills the rest.

    Args:
        lengths: tokens of the documents, longest first.
        world_size: ranks.
        local_length: slots of a rank, in tokens.
        limit: area of a rank, in query-key pairs; a goal, which the result may miss.
        num_long: documents that are cut from their ends; the others stay whole.
        loose: share of all slots for the shortest documents, which are left out, so that the
            cuts of long documents can move.
        early: share of a rank's other slots that takes first rows of the document it cuts.
    """
    slots = world_size * local_length
    room = Room([local_length] * world_size, [limit] * world_size)
    short = lengths[num_long:]
    filler = Filler(slots - sum(lengths[:num_long]), sum(area_of(0, n) for n in short))
    cuts = _cut_long(lengths[:num_long], room, filler, early)
    whole = _deal_whole(lengths, num_long, room, loose)
    dealt = {run.doc for run in whole}
    left = [n for doc, n in enumerate(short, num_long) if doc not in dealt]
    rest = Filler(slots - sum(lengths) + sum(left), sum(area_of(0, n) for n in left))
    moved = _move_cuts(cuts, lengths, room, rest.density)
    return whole + [run for cut in moved for run in _runs(cut)]


def _cut_long(lengths: list[int], room: Room, filler: Filler, early: float) -> list[Cut]:
    """Place long documents, the one that ends latest first.

    What fits whole goes where it fits tightest. What does not is cut: the rank with most spare
    budget takes a part from the end.
    """
    ranks = room.by_spare(filler.density)
    todo = [(stop, 0, doc) for doc, stop in reversed(list(enumerate(lengths)))]
    unused, cuts = filler.tokens, []
    while todo:
        stop, start, doc = todo.pop()
        size = stop - start
        at = _tightest(ranks, room, size, area_of(start, stop) - filler.density * size)
        if at is not None:
            rank = ranks.pop(at)[1]
            cut = Cut(doc, rank, start, stop, 0, size)
        else:
            rank = ranks.pop()[1]
            cut = _cut(doc, rank, start, stop, room, filler.density, max(0, unused))
            cut = _with_early(cut, room, filler.density, early)
            if not cut.early + cut.late:  # no budget anywhere: slots decide
                cut = cut._replace(late=min(room.slots[rank], size))
            unused -= room.slots[rank] - cut.early - cut.late
        cuts.append(cut)
        room.take(cut)
        if room.slots[rank]:
            insort(ranks, (room.budget[rank] - filler.density * room.slots[rank], rank))
        if not cut.is_rest:
            insort(todo, (stop - cut.late, start + cut.early, doc))
    return cuts


def _tightest(ranks: list[tuple[float, int]], room: Room, size: int, spare: float) -> int | None:
    """Return the place in `ranks` of the least spare budget that suffices, with the slots."""
    first = bisect_left(ranks, (spare, -1))
    for at in range(first, min(len(ranks), first + _PATIENCE)):
        if room.slots[ranks[at][1]] >= size:
            return at
    return None


def _cut(
    doc: int, rank: int, start: int, stop: int, room: Room, density: float, filler: float
) -> Cut:
    """Take from the end what brings the rank to its limit once its slots are full.

    Late rows u up to `stop` have area u * (stop + 1/2) - u**2 / 2. The other slots get filler of
    mean area `density` while there is some, then the document's own first rows, which the rank
    receives anyway.
    """
    slots, budget, size = room.slots[rank], room.budget[rank], stop - start
    late = _late_rows(stop, size, slots, budget, density)
    if slots - late <= filler or late == size:
        return Cut(doc, rank, start, stop, 0, late)
    both = min(int(slots - filler), size)  # early rows v = both - u: linear in u
    spare = budget - density * filler - both * start - both * both / 2
    late = both if both == size else int(min(max(0.0, spare / (size - both)), both))
    return Cut(doc, rank, start, stop, both - late, late)


def _late_rows(stop: int, size: int, slots: int, budget: int, density: float) -> int:
    """Return the rows up to `stop` that use the budget up, other slots filled at `density`."""
    reach, spare = stop + 0.5 - density, budget - density * slots
    late = float(slots)
    if reach > 0 and reach * reach > 2 * spare:
        late = reach - math.sqrt(reach * reach - 2 * max(0.0, spare))
    return int(min(late, slots, size))


def _with_early(cut: Cut, room: Room, density: float, share: float) -> Cut:
    """Give a cut first rows in place of a share of the filler, unless they attend much."""
    slots, budget = room.slots[cut.rank], room.budget[cut.rank]
    size = cut.stop - cut.start
    early = min(int(share * (slots - cut.late)), (size - cut.late) // 2)
    if cut.early or not cut.late or early <= 0 or (cut.start + early) * slots > budget:
        return cut
    budget -= area_of(cut.start, cut.start + early)
    late = _late_rows(cut.stop, size - early, slots - early, budget, density)
    return cut._replace(early=early, late=late) if late else cut


def _deal_whole(lengths: list[int], num_long: int, room: Room, loose: float) -> list[Run]:
    """Deal short documents whole, longest first, to the rank with most budget per slot left."""
    world_size = len(room.slots)
    end, left_out = len(lengths), loose * sum(room.slots)
    while end > num_long and lengths[end - 1] <= left_out:
        end -= 1
        left_out -= lengths[end]
    keep = loose * sum(room.slots) / world_size / 2
    ranks = sorted((b / s, r) for b, s, r in room.left())
    runs = []
    for doc in range(num_long, end):
        size = lengths[doc]
        for at in range(len(ranks) - 1, max(-1, len(ranks) - 1 - _PATIENCE), -1):
            rank = ranks[at][1]
            if room.slots[rank] - keep >= size:
                del ranks[at]
                runs.append(Run(doc, 0, size, rank))
                room.slots[rank] -= size
                room.budget[rank] -= area_of(0, size)
                if room.slots[rank]:
                    insort(ranks, (room.budget[rank] / room.slots[rank], rank))
                break
    return runs


def _move_cuts(cuts: list[Cut], lengths: list[int], room: Room, density: float) -> list[Cut]:
    """Cut the same documents for the same ranks again, now that the short documents are known.

    A rank whose short documents attend more than the mean gets less of the end, and the reverse.
    Gives the first cuts back where a remainder would outgrow its rank's slots.
    """
    for cut in cuts:
        if not cut.is_rest:
            room.take(cut, sign=-1)
    left = {cut.doc: (0, lengths[cut.doc]) for cut in cuts}
    moved = []
    for cut in cuts:
        start, stop = left[cut.doc]
        if cut.is_rest:
            again = Cut(cut.doc, cut.rank, start, stop, 0, stop - start)
            room.take(cut, sign=-1)
        else:
            filler = room.slots[cut.rank] - (cut.early + cut.late if cut.early else 0)
            again = _cut(cut.doc, cut.rank, start, stop, room, density, max(0, filler))
        room.take(again)
        if room.slots[cut.rank] < 0:
            return cuts
        moved.append(again)
        left[cut.doc] = (start + again.early, stop - again.late)
    return moved


def _runs(cut: Cut) -> list[Run]:
    runs = [
        Run(cut.doc, cut.stop - cut.late, cut.stop, cut.rank),
        Run(cut.doc, cut.start, cut.start + cut.early, cut.rank),
    ]
    return [run for run in runs if run.start < run.stop]
