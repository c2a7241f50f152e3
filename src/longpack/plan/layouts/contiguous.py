"""Equal consecutive shards: least traffic, unbalanced; what recurrent layers need."""

from longpack.packing import PackedRow
from longpack.plan.shards import Shards


def contiguous(row: PackedRow, world_size: int) -> Shards:
    """Give rank r rows [r*n, (r+1)*n), with n = ceil(length / P)."""
    n = -(-row.length // world_size)
    return Shards.from_runs(
        ((r * n, (r + 1) * n, r) for r in range(world_size)), world_size, row.length
    )
