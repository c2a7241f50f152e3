"""In how many exchanges a rank's arrivals travel best, from a small table of costs."""

from dataclasses import dataclass

import numpy as np

from longpack.plan.parts import own_before
from longpack.plan.plan import Plan

CANDIDATES = (1, 2, 4, 8)


@dataclass(frozen=True)
class StageCosts:
    """Nanoseconds that decide how many stages pay.

    The defaults were measured for 9/3 heads of 64 in fp32 on two gloo ranks of one thread each,
    on a two-core AMD EPYC with torch 2.13: 0.85 GB/s between ranks, 0.2 ms for an exchange of
    nearly nothing. There a row travels in the time of 50 query-key pairs, so what hides behind a
    rank's own rows hides in one stage; more pay where the link is slow and own work is little.

    Args:
        pair_ns: of attending one query-key pair, all heads, forward.
        row_ns: of one row of K and V on the link.
        exchange_ns: of an exchange, however little it brings.
        merge_ns: of merging one more piece into one query row.
    """

    pair_ns: float = 36.0
    row_ns: float = 1_800.0
    exchange_ns: float = 200_000.0
    merge_ns: float = 1_100.0


def choose_stages(plan: Plan, costs: StageCosts | None = None) -> int:
    """Return the number of stages with the shortest predicted forward of the slowest rank.

    Own rows are attended first; then each stage as soon as it has arrived and the one before it
    is done. A function of the plan and the costs, so all ranks choose alike.
    """
    if plan.kv_exchange == "allgather":
        return 1
    costs = costs or StageCosts()
    finish = {stages: float(_finish_ns(plan, stages, costs).max()) for stages in CANDIDATES}
    return min(CANDIDATES, key=lambda stages: (finish[stages], stages))


def _finish_ns(plan: Plan, stages: int, costs: StageCosts) -> np.ndarray:
    """Predict when each rank is done, `[P]`."""
    p = plan.pieces
    order, own = own_before(plan)
    owner, size = p.owner[order], (p.stop - p.start)[order]
    world = plan.world_size
    own_area = np.bincount(owner, weights=size * own + size * (size + 1) / 2, minlength=world)
    merging = (p.start - p.doc_start)[order] > own
    merged_rows = np.bincount(owner, weights=size * merging, minlength=world)
    arriving = np.array(plan.received_tokens)
    piece_ns = (p.area - own_area) * costs.pair_ns / stages + merged_rows * costs.merge_ns
    now = own_area * costs.pair_ns
    for stage in range(1, stages + 1):
        arrival = stage * (arriving * costs.row_ns / stages + costs.exchange_ns)
        now = np.maximum(now, arrival) + piece_ns
    return now
