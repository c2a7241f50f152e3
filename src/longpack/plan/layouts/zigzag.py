"""An early and a late piece of every document for each rank: balanced, at much traffic."""

import numpy as np

from longpack.packing import PackedRow
from longpack.plan.shards import Shards


def zigzag(row: PackedRow, world_size: int) -> Shards:
    """Cut each document into 2P pieces; rank r owns pieces r and 2P-1-r.

    A document need not be a multiple of 2P: its L mod 2P surplus rows go, one each, to the
    ranks that hold fewest rows so far, so that real rows per rank never differ by more than one.
    """
    owners = np.array([*range(world_size), *reversed(range(world_size))])
    held = np.zeros(world_size, dtype=np.int64)
    runs = []
    for start, stop in row.documents:
        share, surplus = divmod(stop - start, 2 * world_size)
        sizes = np.full(2 * world_size, share)
        # each rank can take two surplus rows; the emptiest ranks come first, twice if need be
        order = np.argsort(held, kind="stable")
        takers = np.concatenate([order, 2 * world_size - 1 - order])[:surplus]
        sizes[takers] += 1
        held += sizes[:world_size] + sizes[: world_size - 1 : -1]
        stops = start + np.cumsum(sizes)
        some = sizes > 0  # a document shorter than 2P has fewer pieces
        runs.append(np.stack([stops - sizes, stops, owners], axis=1)[some])
    table = np.concatenate(runs) if runs else np.empty((0, 3), dtype=np.int64)
    return Shards.from_runs(table, world_size, row.length)
