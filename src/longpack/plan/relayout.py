"""Relayout: which rows move when ranks change from one layout of a row to another."""

import numpy as np

from longpack.errors import PlanError
from longpack.plan.shards import Shards
from longpack.plan.transfers import RankTransfers, locate


def relayout(source: Shards, target: Shards, rank: int) -> RankTransfers:
    """Return what one rank sends and receives to hold `target`'s rows instead of `source`'s.

    One all-to-all of every row that changes ranks. `key_rows` is the place of each row of
    `target`, in its local order, among the rank's own rows followed by what arrives.

    Raises:
        PlanError: the layouts are of rows or ranks of different number.
    """
    ours, theirs = ((s.world_size, s.world_size * s.local_length) for s in (source, target))
    if ours != theirs:
        raise PlanError(
            f"a layout of {ours[1]} rows on {ours[0]} ranks cannot become one of {theirs[1]} rows "
            f"on {theirs[0]}: plan both for the same padded row"
        )
    world_size, n = source.world_size, source.local_length
    to, _ = locate(target, source.rows(rank))
    leaving = np.flatnonzero(to != rank)
    leaving = leaving[np.argsort(to[leaving], kind="stable")]
    origin, local = locate(source, target.rows(rank))
    arriving = np.flatnonzero(origin != rank)
    arriving = arriving[np.argsort(origin[arriving], kind="stable")]
    places = local.copy()
    places[arriving] = n + np.arange(arriving.size)
    return RankTransfers(
        rank,
        send_rows=leaving,
        send_counts=tuple(np.bincount(to[leaving], minlength=world_size).tolist()),
        receive_counts=tuple(np.bincount(origin[arriving], minlength=world_size).tolist()),
        key_rows=places,
    )
