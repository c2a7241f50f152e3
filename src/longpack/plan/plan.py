"""Plan: everything that one step of context parallelism does, as integers."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longpack.errors import PlanError
from longpack.packing import PackedRow
from longpack.plan.cost import CostModel, choose_layout
from longpack.plan.layouts import find_layout, shortfall
from longpack.plan.pieces import Pieces
from longpack.plan.shards import Shards
from longpack.plan.transfers import (
    RankTransfers,
    choose_exchange,
    rank_transfers,
    received_rows,
)

Segment = tuple[int, int, int, int]
MAX_RANKS = 1 << 20  # planning takes memory and time of the order of the ranks


@dataclass(frozen=True, eq=False)
class Plan:
    """What every rank holds, attends and receives in one step; the same value on every rank.

    Two plans are equal when their digests are. Nothing here needs a process group: any rank of
    any world can be planned anywhere.

    Args:
        row: the documents, before padding for the world size.
        layout: name of the layout that made `shards`.
        shards: who holds which rows; the padded row has `world_size * local_length` rows.
        kv_exchange: the exchange that runs, with `exchange_reason` saying why.
        layout_reason: why this layout.
    """

    row: PackedRow
    layout: str
    shards: Shards
    kv_exchange: str
    exchange_reason: str
    layout_reason: str = "as asked"

    @property
    def world_size(self) -> int:
        """Ranks on the cp axis."""
        return self.shards.world_size

    @property
    def local_length(self) -> int:
        """Rows per rank, padding included, in tokens."""
        return self.shards.local_length

    @property
    def padded_length(self) -> int:
        """Rows of the row that is split: `world_size * local_length`, in tokens."""
        return self.world_size * self.local_length

    @cached_property
    def pieces(self) -> Pieces:
        """The documents cut by the shards."""
        return Pieces.cut(self.row, self.shards)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Real tokens per rank."""
        return tuple(self.pieces.tokens.tolist())

    @cached_property
    def area(self) -> tuple[int, ...]:
        """Query-key pairs per rank; they sum to the row's area."""
        return tuple(self.pieces.area.tolist())

    @cached_property
    def received_tokens(self) -> tuple[int, ...]:
        """K/V rows that arrive at each rank in one attention call.

        In `halo` and `a2a` exactly the needed rows that the rank does not own: the minimum for
        this layout.
        """
        return tuple(received_rows(self.kv_exchange, self.shards, self.pieces).tolist())

    @cached_property
    def segment_count(self) -> tuple[int, ...]:
        """Query segments per rank."""
        return tuple(self.pieces.count.tolist())

    @property
    def imbalance(self) -> float:
        """Area of the busiest rank over the mean area; 1.0 is perfect, also for an empty row."""
        total = sum(self.area)
        return max(self.area) * self.world_size / total if total else 1.0

    def received_bytes(
        self,
        num_kv_heads: int,
        head_dim: int,
        element_bytes: int,
        v_head_dim: int | None = None,
    ) -> tuple[int, ...]:
        """Return bytes of K and V that arrive at each rank in one attention call.

        Args:
            num_kv_heads: K/V heads per rank.
            head_dim: size of a key head.
            element_bytes: bytes of one number, 2 for bf16.
            v_head_dim: size of a value head, `head_dim` by default.
        """
        v_dim = head_dim if v_head_dim is None else v_head_dim
        per_token = num_kv_heads * (head_dim + v_dim) * element_bytes
        return tuple(n * per_token for n in self.received_tokens)

    def transfers(self, rank: int) -> RankTransfers:
        """Return what one rank sends, receives and reads in an attention call."""
        return rank_transfers(self.kv_exchange, rank, self.shards, self.pieces)

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """Return one rank's query segments as `(q_start, q_stop, k_start, k_stop)`.

        q counts local rows, k counts the rank's key rows: needed rows, ascending. Query row
        q_start + i attends key rows [k_start, k_stop - (q_stop - q_start) + 1 + i).
        """
        p = self.pieces
        who, doc, start, stop = p.needs
        first, last = np.searchsorted(who, [rank, rank + 1])
        keys_before = np.concatenate([[0], np.cumsum(stop[first:last] - start[first:last])])
        mine = np.flatnonzero(p.owner == rank)
        need = np.searchsorted(doc[first:last], p.doc[mine])
        k_start = keys_before[need]
        q_start = p.local_start[mine]
        size = p.stop[mine] - p.start[mine]
        table = np.stack(
            [q_start, q_start + size, k_start, k_start + p.stop[mine] - p.doc_start[mine]], axis=1
        )
        return tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in table)

    @cached_property
    def digest(self) -> str:
        """A hash of all that ranks must agree on, 16 hex digits."""
        state = hashlib.sha256()
        state.update(f"{self.row.length} {self.world_size} {self.local_length} ".encode())
        state.update(f"{self.layout} {self.kv_exchange} ".encode())
        for part in (self.row.bounds, self.shards.start, self.shards.stop, self.shards.owner):
            state.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return state.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        mean = sum(self.received_tokens) / self.world_size
        return (
            f"{self.row} over {self.world_size} ranks, {self.layout} ({self.layout_reason}): "
            f"{self.local_length} rows each, area max/mean {self.imbalance:.3f}, "
            f"{self.kv_exchange} ({self.exchange_reason}) brings {mean:.0f} rows to a rank on "
            f"average and {max(self.received_tokens)} to the busiest; digest {self.digest}"
        )


def plan_step(
    row: PackedRow,
    world_size: int,
    layout: str = "contiguous",
    kv_exchange: str = "allgather",
    cost_model: CostModel | None = None,
) -> Plan:
    """Plan one step: who holds which rows, attends what, and receives what.

    A pure function of its arguments, without torch or a process group.

    Args:
        row: the documents.
        world_size: ranks on the cp axis, from 1 to `MAX_RANKS`.
        layout: one of `LAYOUTS`, `balanced:1.1` for another tolerance than 1.05, or `auto` for
            the one with the shortest predicted step.
        kv_exchange: `allgather`, `halo` or `a2a`; `halo` becomes `a2a` for every rank where a
            rank needs rows beyond its left neighbour, and the plan says so.
        cost_model: what `auto` predicts with, the same on every rank; `CostModel()` by default.

    Raises:
        PlanError: an unknown layout or exchange, a world size out of range, or an argument of
            another type.
    """
    if not isinstance(row, PackedRow):
        raise PlanError(f"row is {type(row).__name__}; make it with PackedRow.from_lengths")
    if not isinstance(cost_model, CostModel | None):
        raise PlanError(f"cost_model is {type(cost_model).__name__}, not a CostModel or None")
    if type(world_size) is not int or not 1 <= world_size <= MAX_RANKS:
        shown = world_size if isinstance(world_size, int | float) else type(world_size).__name__
        raise PlanError(f"world_size={shown} ranks; it must be an int from 1 to {MAX_RANKS}")
    why = "as asked"
    if isinstance(layout, str) and layout == "auto":
        layout, why = choose_layout(row, world_size, kv_exchange, cost_model or CostModel())
    shards = find_layout(layout)(row, world_size)
    missed = shortfall(layout, row, shards)
    why = f"{why}, but {missed}" if missed else why
    exchange, reason = choose_exchange(kv_exchange, row, shards)
    return Plan(row, layout, shards, exchange, reason, why)
