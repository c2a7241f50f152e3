"""Traffic: rows that each rank receives and sends in an exchange, inside its node and beyond."""

from dataclasses import dataclass

import numpy as np

from longpack.plan.pieces import Pieces
from longpack.plan.shards import Ints, Shards


@dataclass(frozen=True, eq=False)
class Traffic:
    """Rows of K/V per rank, `[P]` each; `near` is from or to ranks of its node, `far` the rest.

    A row that three ranks need is sent three times.
    """

    received_near: Ints
    received_far: Ints
    sent_near: Ints
    sent_far: Ints

    @property
    def near(self) -> Ints:
        """The larger of what is received and sent inside the node: links carry both at once."""
        return np.maximum(self.received_near, self.sent_near)

    @property
    def far(self) -> Ints:
        """The larger of what is received and sent beyond the node."""
        return np.maximum(self.received_far, self.sent_far)


def count_traffic(kv_exchange: str, shards: Shards, pieces: Pieces, ranks_per_node: int) -> Traffic:
    """Count the rows that an exchange moves, without building any rank's transfers.

    Args:
        kv_exchange: as chosen: `allgather`, `halo` or `a2a`.
        shards, pieces: of the plan.
        ranks_per_node: ranks 0 to this many less one share a node, and so on.
    """
    node = np.arange(shards.world_size) // ranks_per_node
    if kv_exchange == "allgather":
        peers = np.bincount(node)[node] - 1
        near = peers * shards.local_length
        far = (shards.world_size - 1 - peers) * shards.local_length
        return Traffic(near, far, near, far)
    end = shards.world_size * shards.local_length + 1
    return Traffic(*_received(pieces, node, end), *_sent(pieces, node, end))


def _received(pieces: Pieces, node: Ints, end: int) -> tuple[Ints, Ints]:
    """Needed rows on other ranks of the node, and on other nodes."""
    rank, _, start, stop = pieces.needs
    # pieces in order of node, then row: rows of a node before a row are one look-up
    order = np.argsort(node[pieces.owner], kind="stable")
    keys = node[pieces.owner][order] * end + pieces.start[order]
    before = np.concatenate([[0], np.cumsum((pieces.stop - pieces.start)[order])])
    first = np.searchsorted(keys, node[rank] * end + start)
    last = np.searchsorted(keys, node[rank] * end + stop)
    here = np.zeros_like(pieces.needed)
    np.add.at(here, rank, before[last] - before[first])
    return here - pieces.tokens, pieces.needed - here


def _sent(pieces: Pieces, node: Ints, end: int) -> tuple[Ints, Ints]:
    """Rows times the other ranks that need them: of the node, and of other nodes."""
    rank, doc, _, stop = pieces.needs
    # the needs of a document that reach past a piece's start are those that take the piece
    doc_stop = np.zeros(int(doc.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(doc_stop, pieces.doc, pieces.stop)
    everyone = _reaching(np.sort(stop), pieces.start, doc_stop[pieces.doc])
    shift = node[pieces.owner] * end
    keys = np.sort(node[rank] * end + stop)
    here = _reaching(keys, shift + pieces.start, shift + doc_stop[pieces.doc])
    size = pieces.stop - pieces.start
    near, far = np.zeros_like(pieces.tokens), np.zeros_like(pieces.tokens)
    np.add.at(near, pieces.owner, size * (here - 1))  # the owner needs it too
    np.add.at(far, pieces.owner, size * (everyone - here))
    return near, far


def _reaching(stops: Ints, after: Ints, until: Ints) -> Ints:
    """Count, of sorted stops, those in `(after, until]`."""
    return np.searchsorted(stops, until, "right") - np.searchsorted(stops, after, "right")
