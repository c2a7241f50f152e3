"""Parts: one rank's attention cut into what its own K/V serve and what must arrive first."""

from dataclasses import dataclass

import numpy as np

from longpack.plan.plan import Plan, Segment
from longpack.plan.shards import Ints, expand
from longpack.plan.transfers import rank_transfers


@dataclass(frozen=True, eq=False)
class StageRows:
    """Rows that travel together, and what they serve.

    Args:
        send_rows: int64, local rows to send, grouped by destination in rank order.
        send_counts, receive_counts: rows for and from each rank, `[P]`.
        reading: int64, the arrivals (by source, then row) in ascending order of rows, or None
            where they arrive so.
        remote: full segments: query rows `[q_start, q_stop)` attend all of the arrivals
            `[k_start, k_stop)`, counted in reading order.
    """

    send_rows: Ints
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    reading: Ints | None
    remote: tuple[Segment, ...]

    @property
    def received(self) -> int:
        """Rows that arrive."""
        return sum(self.receive_counts)


@dataclass(frozen=True, eq=False)
class Parts:
    """One rank's query segments, cut by where their keys are.

    A rank's rows of one document are neighbours in local order, whatever the layout. So what
    they attend among themselves is one causal square for each document, as if the rank's rows
    were a packed row of their own; and what a segment attends elsewhere is, in ascending order,
    the first so many of the document's rows that arrive: one full rectangle.

    Args:
        local: `(start, stop, start, stop)` for each document: local rows attend each other.
        stages: what arrives, in `len(stages)` exchanges.
        gathered: int64 `[R]`, for all arrivals in reading order, their places among the local
            rows of all ranks in rank order: what an all-gather is read with.
        shared: some rank reads a row that it receives in more than one segment; the same on
            every rank.
    """

    local: tuple[Segment, ...]
    stages: tuple[StageRows, ...]
    gathered: Ints
    shared: bool

    @property
    def received(self) -> int:
        """Rows that arrive, in all stages."""
        return sum(stage.received for stage in self.stages)


def cut_parts(plan: Plan, rank: int, stages: int = 1) -> Parts:
    """Cut one rank's attention into its local part and `stages` remote ones.

    Each list of rows from one rank to another travels in `stages` equal consecutive parts, so
    both ends know the counts.
    """
    moved = rank_transfers("a2a", rank, plan.shards, plan.pieces)
    arrived = moved.key_rows >= plan.local_length
    order = moved.key_rows[arrived] - plan.local_length  # arrivals by wire, ascending rows
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    local, remote = _bounds(plan, rank, arrived)
    cut = []
    for stage in range(stages):
        outgoing, send_counts = _stage_of(moved.send_counts, stage, stages)
        incoming, receive_counts = _stage_of(moved.receive_counts, stage, stages)
        rows = place[incoming]
        reading = np.argsort(rows, kind="stable")
        seen = rows[reading]
        k_start, k_stop = (np.searchsorted(seen, remote[:, i]) for i in (2, 3))
        table = np.stack([remote[:, 0], remote[:, 1], k_start, k_stop], axis=1)
        in_order = bool((reading[1:] > reading[:-1]).all())
        cut.append(
            StageRows(
                moved.send_rows[outgoing],
                send_counts,
                receive_counts,
                None if in_order else reading,
                _tuples(table[k_start < k_stop]),
            )
        )
    gathered = rank_transfers("allgather", rank, plan.shards, plan.pieces).key_rows[arrived]
    if stages > 1:
        wire = [_stage_of(moved.receive_counts, stage, stages)[0] for stage in range(stages)]
        gathered = gathered[np.concatenate([np.sort(place[w]) for w in wire])]
    return Parts(_tuples(local), tuple(cut), gathered, _shares_arrivals(plan))


def _stage_of(counts: tuple[int, ...], stage: int, stages: int) -> tuple[Ints, tuple[int, ...]]:
    """Return the positions and counts of one stage's part of consecutive lists of `counts`."""
    sizes = np.array(counts, dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    start, stop = sizes * stage // stages, sizes * (stage + 1) // stages
    return expand(before + start, before + stop), tuple((stop - start).tolist())


def _bounds(plan: Plan, rank: int, arrived: np.ndarray) -> tuple[Ints, Ints]:
    """Return the local squares, and `(q_start, q_stop, k_start, k_stop)` among all arrivals."""
    segments = np.array(plan.segments(rank), dtype=np.int64).reshape(-1, 4)
    q_start, q_stop, k_start, k_stop = segments.T
    first = np.ones(len(segments), dtype=bool)
    first[1:] = k_start[1:] != k_start[:-1]  # segments of one document start at one key
    last = np.append(first[1:], True)[: len(segments)]
    square = np.stack([q_start[first], q_stop[last]], axis=1)
    before = np.concatenate([[0], np.cumsum(arrived)])
    remote = np.stack([q_start, q_stop, before[k_start], before[k_stop]], axis=1)
    return np.concatenate([square, square], axis=1), remote


def _shares_arrivals(plan: Plan) -> bool:
    """Say whether, on any rank, two segments of one document read rows of other ranks."""
    p = plan.pieces
    order, own = own_before(plan)
    owner, doc = p.owner[order], p.doc[order]
    follows = (owner[1:] == owner[:-1]) & (doc[1:] == doc[:-1])
    reads = (p.start - p.doc_start)[order] > own
    return bool((reads[:-1] & follows).any())


def own_before(plan: Plan) -> tuple[Ints, Ints]:
    """Count the rows of its document that a piece's rank holds before it.

    Returns:
        Piece numbers by rank, document and row; and for each the count.
    """
    p = plan.pieces
    order = np.lexsort((p.start, p.doc, p.owner))
    owner, doc, size = p.owner[order], p.doc[order], (p.stop - p.start)[order]
    first = np.ones(order.size, dtype=bool)
    first[1:] = (owner[1:] != owner[:-1]) | (doc[1:] != doc[:-1])
    before = np.cumsum(size) - size
    return order, before - before[first][np.cumsum(first) - 1]


def _tuples(table: Ints) -> tuple[Segment, ...]:
    return tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in table)
