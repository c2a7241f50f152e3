"""Blocks of rows as views and gathered, and tiles against brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longpack.kernels import full_tiles
from longpack.kernels.blocks import BlockedRows, Blocks
from longpack.kernels.tiles import CALL_ROWS, cut_into_tiles

BLOCKS = {
    "one": Blocks((3,), 4),
    "adjacent": Blocks((2, 5, 8), 3),
    "apart": Blocks((1, 4, 9), 2),
    "evenly apart": Blocks((0, 4, 8), 2),
    "of one row": Blocks((0, 1, 7), 1),
}
# name: rows [12, 3, D] of a layout
LAYOUTS = {
    "rows first": lambda d, dtype: torch.zeros(12, 3, d, dtype=dtype),
    "heads first": lambda d, dtype: torch.zeros(3, 12, d, dtype=dtype).transpose(0, 1),
    "half of wider rows": lambda d, dtype: torch.zeros(12, 3, 2 * d, dtype=dtype)[..., d:],
    "one row in": lambda d, dtype: torch.zeros(13, 3, d, dtype=dtype)[1:],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 5, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BLOCKS)
def test_rows_are_read_and_written_by_blocks(name, layout, head_dim, dtype):
    """Numbers up to 127 and their sums are exact in every dtype; nan and infinity pass too."""
    blocks, rows = BLOCKS[name], LAYOUTS[layout](head_dim, dtype)
    generator = torch.Generator().manual_seed(0)
    rows.copy_(torch.randint(0, 128, rows.shape, generator=generator))
    expected = rows.clone()
    starts, n = blocks.starts, blocks.length
    read = BlockedRows(rows).read(blocks)
    assert torch.equal(read, torch.stack([expected[s : s + n].transpose(0, 1) for s in starts]))

    values = torch.randint(0, 128, read.shape, generator=generator).to(dtype)
    BlockedRows(rows).add(blocks, values)
    for start, block in zip(starts, values, strict=True):
        expected[start : start + n] += block.transpose(0, 1)
    assert torch.equal(rows, expected)

    values[0, 0] = torch.nan
    values[-1, -1] = torch.inf
    BlockedRows(rows).write(blocks, values.float())  # rounded to the dtype of the rows
    for start, block in zip(starts, values, strict=True):
        expected[start : start + n] = block.transpose(0, 1)
    assert torch.equal(rows.isnan(), expected.isnan())
    assert torch.equal(rows.nan_to_num(), expected.nan_to_num())


def test_log_sum_exps_have_no_last_dim():
    lse = torch.arange(24.0).view(12, 2)
    blocks = BLOCKS["apart"]
    read = BlockedRows(lse).read(blocks)
    assert read.tolist() == [[[2.0, 4.0], [3.0, 5.0]], [[8, 10], [9, 11]], [[18, 20], [19, 21]]]
    BlockedRows(lse).write(blocks, torch.zeros(3, 2, 2))
    assert (lse == 0).all(dim=1).nonzero().flatten().tolist() == [1, 2, 4, 5, 9, 10]


def test_adjacent_blocks_are_views():
    rows = torch.zeros(12, 3, 4)
    assert all(BLOCKS[name].adjacent for name in ("one", "adjacent"))
    assert not any(BLOCKS[name].adjacent for name in ("apart", "evenly apart", "of one row"))
    BlockedRows(rows).read(BLOCKS["adjacent"]).fill_(1.0)
    assert rows.sum() == 9 * 3 * 4


@st.composite
def bounds(draw):
    """Draw ascending segments, with keys in order or anywhere, shared or not."""
    found, row, key = [], 0, 0
    for _ in range(draw(st.integers(0, 30))):
        row += draw(st.integers(0, 1))
        n = draw(st.sampled_from([1, 2, 2, 3, 40, 200]))
        k_start = key if draw(st.booleans()) else draw(st.integers(0, key))
        keys = n + draw(st.sampled_from([0, 0, 1, 2]))
        found.append((row, row + n, k_start, k_start + keys))
        row, key = row + n, max(key, k_start + keys)
    return tuple(found)


def pairs_of(tile):
    """Yield what a tile attends: query, its keys."""
    queries, keys = tile.queries, tile.keys
    assert not tile.causal or queries.length == keys.length
    for q_start, k_start in zip(queries.starts, keys.starts, strict=True):
        for i in range(queries.length):
            seen = i + 1 if tile.causal else keys.length
            yield q_start + i, range(k_start, k_start + seen)


def check_tiles(tiles, expected, continue_from):
    """Every pair once; a query's first tile overwrites, others continue; blocks share no row."""
    seen = {}
    for tile in tiles:
        for blocks in (tile.queries, tile.keys):
            gaps = zip(blocks.starts, blocks.starts[1:], strict=False)
            assert all(b - a >= blocks.length for a, b in gaps)
        rows = len(tile.queries.starts) * max(tile.queries.length, tile.keys.length)
        assert len(tile.queries.starts) == 1 or rows <= CALL_ROWS
        for query, keys in pairs_of(tile):
            assert tile.continues == (continue_from or query in seen)
            seen.setdefault(query, []).extend(keys)
    assert {query: sorted(keys) for query, keys in seen.items()} == expected


@settings(max_examples=80, deadline=None)
@given(bounds=bounds())
def test_tiles_attend_every_pair_once(bounds):
    causal = {
        q_start + i: list(range(k_start, k_stop - (q_stop - q_start) + 1 + i))
        for q_start, q_stop, k_start, k_stop in bounds
        for i in range(q_stop - q_start)
    }
    check_tiles(cut_into_tiles(bounds), causal, False)
    full = {q: list(range(b[2], b[3])) for b in bounds for q in range(b[0], b[1])}
    check_tiles(full_tiles(bounds), full, True)


def test_short_blocks_are_joined_wherever_they_are_and_long_ones_where_they_touch():
    short = tuple((10 * i, 10 * i + 3, 10 * i, 10 * i + 3) for i in range(20))
    assert len(cut_into_tiles(short)) == 1
    assert len(full_tiles(short)) == 1
    apart = tuple((200 * i, 200 * i + 60, 200 * i, 200 * i + 60) for i in range(4))
    touching = tuple((60 * i, 60 * i + 60, 60 * i, 60 * i + 60) for i in range(4))
    assert len(cut_into_tiles(apart)) == 4
    assert len(cut_into_tiles(touching)) == 1
