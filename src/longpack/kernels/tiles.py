"""Cut segments into what a kernel with square causal masks can run."""

from dataclasses import dataclass, replace

Bounds = tuple[int, int, int, int]


@dataclass(frozen=True)
class Tile:
    """Describe `count` adjacent equal blocks of queries against adjacent equal blocks of keys.

    Block b holds the queries `q_start + b * q_len + [0, q_len)` and the keys
    `k_start + b * k_len + [0, k_len)`. `causal` blocks are square; others see every key.
    `continues` says that an earlier tile has attended other keys with the same queries.
    """

    q_start: int
    q_len: int
    k_start: int
    k_len: int
    causal: bool
    continues: bool = False
    count: int = 1


def cut_into_tiles(bounds: tuple[Bounds, ...]) -> tuple[Tile, ...]:
    """Cut segments into full and square causal tiles, and join equal neighbours.

    A segment of n queries and m > n keys is a full tile over the first m - n keys and a causal
    one over the last n; a single query sees all its keys, so it is one full tile. Neighbours
    of equal shape become one tile of several blocks: one call instead of hundreds when
    documents are short and equal.
    """
    tiles: list[Tile] = []
    for q_start, q_stop, k_start, k_stop in bounds:
        queries, keys = q_stop - q_start, k_stop - k_start
        prefix = keys - queries
        if queries == 1:
            _append(tiles, Tile(q_start, 1, k_start, keys, causal=False))
            continue
        if prefix:
            _append(tiles, Tile(q_start, queries, k_start, prefix, causal=False))
        diagonal = Tile(q_start, queries, k_start + prefix, queries, True, prefix > 0)
        _append(tiles, diagonal)
    return tuple(tiles)


def full_tiles(bounds: tuple[Bounds, ...]) -> tuple[Tile, ...]:
    """Make a full tile of each segment, for keys that its queries all see after others."""
    tiles: list[Tile] = []
    for q_start, q_stop, k_start, k_stop in bounds:
        _append(tiles, Tile(q_start, q_stop - q_start, k_start, k_stop - k_start, False, True))
    return tuple(tiles)


def _append(tiles: list[Tile], tile: Tile) -> None:
    last = tiles[-1] if tiles else None
    if last and (last.q_len, last.k_len, last.causal) == (tile.q_len, tile.k_len, tile.causal):
        adjacent = (
            tile.q_start == last.q_start + last.count * last.q_len
            and tile.k_start == last.k_start + last.count * last.k_len
        )
        if adjacent and last.continues == tile.continues:
            tiles[-1] = replace(last, count=last.count + 1)
            return
    tiles.append(tile)
