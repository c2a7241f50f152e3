"""Cut segments into what a kernel with square causal masks can run, in few calls."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from longpack.kernels.blocks import Blocks

Bounds = tuple[int, int, int, int]

# Measured on torch 2.13, two x86 cores, forward and backward in fp32, 9/3 heads of 64.
# A call of few rows works in memory that is in cache and in use already: on one thread, 600
# documents of 27 tokens take 0.86 of a loop's time so, 1.08 in one call. A call of many keeps
# threads busy: on two, 32 documents of 512 take 0.72 to 0.84 so, 0.98 in single calls.
CALL_ROWS = 1024
# What gathering costs a row soon passes what a call costs a document: over single calls, blocks of
# 16 rows take 0.75 to 0.95 of the time on one thread, of 48 rows 0.94 to 1.03, of 64 rows 0.99 to
# 1.04. On two threads it pays longer: 0.70, 0.85 and 0.90.
GATHERED_ROWS = 48


@dataclass(frozen=True)
class Tile:
    """Describe one kernel call: equal blocks of queries against as many equal blocks of keys.

    `causal` blocks are square; queries of others see every key of their block. `continues` says
    that an earlier tile has attended other keys with the same queries.
    """

    queries: Blocks
    keys: Blocks
    causal: bool
    continues: bool = False


class Shape(NamedTuple):
    """What the blocks of one tile have in common."""

    q_len: int
    k_len: int
    causal: bool
    continues: bool


Cut = tuple[int, int, Shape]  # first query, first key, shape


def cut_into_tiles(bounds: tuple[Bounds, ...]) -> tuple[Tile, ...]:
    """Cut segments into full and square causal blocks, and join equal ones into tiles.

    A segment of n queries and m > n keys is a full block over the first m - n keys and a causal
    one over the last n; a single query sees all its keys, so it is one full block.
    """
    cuts: list[Cut] = []
    for q_start, q_stop, k_start, k_stop in bounds:
        queries, keys = q_stop - q_start, k_stop - k_start
        prefix = keys - queries
        if queries == 1:
            cuts.append((q_start, k_start, Shape(1, keys, False, False)))
            continue
        if prefix:
            cuts.append((q_start, k_start, Shape(queries, prefix, False, False)))
        cuts.append((q_start, k_start + prefix, Shape(queries, queries, True, prefix > 0)))
    return _join(cuts)


def full_tiles(bounds: tuple[Bounds, ...]) -> tuple[Tile, ...]:
    """Make a full block of each segment, for keys that its queries all see after others."""
    cuts: list[Cut] = []
    for q_start, q_stop, k_start, k_stop in bounds:
        shape = Shape(q_stop - q_start, k_stop - k_start, False, True)
        cuts.append((q_start, k_start, shape))
    return _join(cuts)


def _join(cuts: list[Cut]) -> tuple[Tile, ...]:
    """Join blocks of one shape into tiles: neighbours, and short ones wherever they are.

    So short documents, however mixed, cost at most a call for each length and each `CALL_ROWS`
    rows. Tiles that continue come last.
    """
    starts: dict[Shape, list[tuple[int, int]]] = {}
    for q_start, k_start, shape in cuts:
        starts.setdefault(shape, []).append((q_start, k_start))
    return tuple(
        _tile(shape, run)
        for shape in sorted(starts, key=lambda shape: shape.continues)
        for run in _runs(shape, starts[shape])
    )


def _runs(shape: Shape, starts: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut the blocks of one shape into runs for one call each, in which no two share a row."""
    rows = max(shape.q_len, shape.k_len)
    widest_gap = math.inf if rows <= GATHERED_ROWS else 0
    run = starts[:1]
    for q_start, k_start in starts[1:]:
        gaps = (q_start - run[-1][0] - shape.q_len, k_start - run[-1][1] - shape.k_len)
        if min(gaps) < 0 or max(gaps) > widest_gap or (len(run) + 1) * rows > CALL_ROWS:
            yield run
            run = []
        run.append((q_start, k_start))
    yield run


def _tile(shape: Shape, run: list[tuple[int, int]]) -> Tile:
    q_starts, k_starts = zip(*run, strict=True)
    queries, keys = Blocks(q_starts, shape.q_len), Blocks(k_starts, shape.k_len)
    return Tile(queries, queries if keys == queries else keys, shape.causal, shape.continues)
