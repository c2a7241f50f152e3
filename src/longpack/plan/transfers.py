"""Transfers: which K/V rows move from which rank to which, for each way of exchanging them."""

from dataclasses import dataclass

import numpy as np

from longpack.errors import PlanError
from longpack.packing import PackedRow
from longpack.plan.pieces import Pieces
from longpack.plan.shards import Ints, Shards, expand

EXCHANGES = ("allgather", "halo", "a2a")


@dataclass(frozen=True, eq=False)
class RankTransfers:
    """One rank's part of an exchange.

    The rows a rank can read after the exchange are laid out as `landed`: for `allgather` every
    rank's local rows in rank order; otherwise the rank's own local rows, then what arrived,
    ascending by source rank and row.

    Args:
        rank: the rank.
        send_rows: int64, local rows to send, grouped by destination in rank order.
        send_counts: rows for each rank, `[P]`; 0 for itself.
        receive_counts: rows from each rank, `[P]`; 0 from itself.
        key_rows: int64 `[K]`, for each key row the kernel reads (the needed rows, ascending),
            its place in `landed`.
    """

    rank: int
    send_rows: Ints
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    key_rows: Ints


def choose_exchange(asked: str, row: PackedRow, shards: Shards) -> tuple[str, str]:
    """Return the exchange that runs and the reason, the same on every rank.

    `halo` runs where every rank needs rows of its left neighbour alone, which holds when shards
    are contiguous and no document reaches back past the neighbour's shard; otherwise `a2a`,
    which moves the same rows, takes its place on every rank.
    """
    if not isinstance(asked, str) or asked not in EXCHANGES:
        raise PlanError(f"kv_exchange={asked!r} is unknown; it is one of {', '.join(EXCHANGES)}")
    if asked != "halo":
        return asked, "as asked"
    n = shards.local_length
    contiguous = shards.start.size == 0 or (
        shards.start.size == shards.world_size and bool((shards.start == shards.owner * n).all())
    )
    if not contiguous:
        return "a2a", "halo needs contiguous shards; all-to-all moves the same rows"
    rank, doc, start, _ = Pieces.cut(row, shards).needs
    straddle = rank * n - start
    if (straddle > n).any():
        at = int(np.argmax(straddle))
        return "a2a", (
            f"halo reaches one shard of {n} rows to the left, but document {doc[at]} starts "
            f"{straddle[at]} rows before rank {rank[at]}'s shard; all-to-all moves the same rows"
        )
    return "halo", "as asked"


def received_rows(exchange: str, shards: Shards, pieces: Pieces) -> Ints:
    """Rows that arrive at each rank, `[P]`: needed minus owned, or everybody else's."""
    if exchange == "allgather":
        others = (shards.world_size - 1) * shards.local_length
        return np.full(shards.world_size, others, dtype=np.int64)
    return pieces.needed - pieces.tokens


def rank_transfers(exchange: str, rank: int, shards: Shards, pieces: Pieces) -> RankTransfers:
    """Return what one rank sends, receives and reads."""
    world, n = shards.world_size, shards.local_length
    start, stop = _stretches(pieces, rank)
    needed = expand(start, stop)
    owner, local = locate(shards, needed)
    if exchange == "allgather":
        everyone = tuple(0 if r == rank else n for r in range(world))
        return RankTransfers(rank, np.arange(n), everyone, everyone, owner * n + local)
    received = owner != rank
    counts = np.bincount(owner[received], minlength=world)
    key_rows = np.where(received, 0, local)
    by_source = np.argsort(owner[received], kind="stable")  # rows stay ascending within a source
    places = np.empty(by_source.size, dtype=np.int64)
    places[by_source] = n + np.arange(by_source.size)
    key_rows[received] = places
    send_rows, send_counts = _sends(shards, pieces, rank)
    return RankTransfers(rank, send_rows, send_counts, tuple(counts.tolist()), key_rows)


def locate(shards: Shards, rows: Ints) -> tuple[Ints, Ints]:
    """Return the owner and the local row of each row."""
    run = np.searchsorted(shards.start, rows, side="right") - 1
    return shards.owner[run], shards.local_start[run] + rows - shards.start[run]


def _stretches(pieces: Pieces, rank: int) -> tuple[Ints, Ints]:
    who, _, start, stop = pieces.needs
    first, last = np.searchsorted(who, [rank, rank + 1])
    return start[first:last], stop[first:last]


def _sends(shards: Shards, pieces: Pieces, rank: int) -> tuple[Ints, tuple[int, ...]]:
    """Return the local rows that others need of `rank`, by destination, ascending rows."""
    mine = np.flatnonzero(pieces.owner == rank)
    who, doc, _, stop = pieces.needs
    by_doc = np.argsort(doc, kind="stable")  # needs of one document, ascending ranks
    first = np.searchsorted(doc[by_doc], pieces.doc[mine], side="left")
    last = np.searchsorted(doc[by_doc], pieces.doc[mine], side="right")
    pair_need = by_doc[expand(first, last)]
    pair_piece = np.repeat(mine, last - first)
    end = np.minimum(pieces.stop[pair_piece], stop[pair_need])
    wanted = (who[pair_need] != rank) & (end > pieces.start[pair_piece])
    pair_need, pair_piece, end = pair_need[wanted], pair_piece[wanted], end[wanted]
    order = np.lexsort((pieces.start[pair_piece], who[pair_need]))
    pair_need, pair_piece, end = pair_need[order], pair_piece[order], end[order]
    begin = pieces.local_start[pair_piece]
    sizes = end - pieces.start[pair_piece]
    counts = np.zeros(shards.world_size, dtype=np.int64)
    np.add.at(counts, who[pair_need], sizes)
    return expand(begin, begin + sizes), tuple(counts.tolist())
