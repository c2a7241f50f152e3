"""An early and a late block of the whole row for each rank: balanced for one long document."""

from longpack.packing import PackedRow
from longpack.plan.shards import Shards


def head_tail(row: PackedRow, world_size: int) -> Shards:
    """Cut the row into 2P blocks of n = ceil(length / 2P) rows; rank r owns r and 2P-1-r."""
    n = -(-row.length // (2 * world_size))
    owners = [*range(world_size), *reversed(range(world_size))]
    return Shards.from_runs(
        ((b * n, (b + 1) * n, owner) for b, owner in enumerate(owners)), world_size, row.length
    )
