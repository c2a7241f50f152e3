"""The layout bench: targets on published lengths, and baselines against their definitions."""

import heapq

import numpy as np
import pytest
from rich.console import Console

from longpack import PackedRow
from longpack.bench.layout_baselines import min_heap, ptrr
from longpack.bench.layouts import CASES, Case, run_layout_bench
from longpack.cli.bench_layouts import print_layouts
from longpack.plan import LAYOUTS, Pieces

NAMES = ("contiguous", "zigzag", "balanced")
SOME = {name: LAYOUTS[name] for name in NAMES} | {"min_heap_512": min_heap}


@pytest.mark.parametrize(("case", "traffic"), [(CASES[0], 0.10), (CASES[1], 0.13)])
def test_balanced_meets_its_targets_on_20_packs(case, traffic):
    """magi_default: 128K rows on 8 ranks and 512K rows on 32, area max/mean at most 1.05."""
    [result] = run_layout_bench([case], packs=20, layouts=SOME)["cases"]
    layouts = result["layouts"]
    assert layouts["balanced"]["imbalance_max"] <= 1.05
    assert layouts["balanced"]["traffic_mean"] <= traffic
    assert layouts["contiguous"]["imbalance_mean"] > 2.5
    assert layouts["min_heap_512"]["traffic_mean"] > 0.3
    assert layouts["zigzag"]["traffic_mean"] == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("case", CASES[3:], ids=lambda c: c.corpus)
def test_balanced_holds_its_tolerance_on_every_corpus(case):
    [result] = run_layout_bench([case], packs=3, layouts=SOME)["cases"]
    layouts = result["layouts"]
    assert layouts["balanced"]["imbalance_max"] <= 1.05
    assert layouts["balanced"]["traffic_mean"] < 0.5 * layouts["min_heap_512"]["traffic_mean"]


def test_packs_are_full_seeded_and_capped():
    case = Case("sqlite3_doc", 131_072, 20_000, 8)
    rows = [case.row(seed) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]
    assert all(row.length == 131_072 and max(row.lengths) <= 20_000 for row in rows)


@pytest.mark.parametrize("layout", [ptrr, min_heap])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "row",
    [
        PackedRow.from_lengths([5000, 300, 200, 40, 1]),
        PackedRow.from_lengths([1000] * 4, padding=777),
        PackedRow.from_lengths([], padding=100),
        PackedRow.from_lengths([7]),
    ],
    ids=str,
)
def test_baselines_give_every_row_to_one_rank(layout, world_size, row):
    shards = layout(row, world_size)
    rows = np.concatenate([shards.rows(r) for r in range(world_size)])
    assert shards.local_length == -(-row.length // world_size)
    assert sorted(rows) == list(range(world_size * shards.local_length))


def test_ptrr_deals_blocks_by_active_blocks_in_snake_order():
    """One document: block b has b + 1 active key blocks; ranks take 7, 6 | 5, 4 back | ..."""
    shards = ptrr(PackedRow.from_lengths([8 * 128]), 2)
    blocks = [sorted(set((shards.rows(r) // 128).tolist())) for r in (0, 1)]
    assert blocks == [[0, 3, 4, 7], [1, 2, 5, 6]]


def test_min_heap_is_the_greedy_rule():
    """Against the rule one chunk at a time, area counted query by query."""
    row = PackedRow.from_lengths([9000, 5000, 1000, 800, 584])  # 32 chunks of 512
    cost = row.position_ids() + 1
    chunks = cost.reshape(32, 512).sum(axis=1)
    heap, owner, count = [(0, r) for r in range(4)], {}, [0] * 4
    for chunk in sorted(range(32), key=lambda c: -chunks[c]):
        load, rank = heapq.heappop(heap)
        owner[chunk] = rank
        count[rank] += 1
        if count[rank] < 8:
            heapq.heappush(heap, (load + int(chunks[chunk]), rank))
    shards = min_heap(row, 4)
    for rank in range(4):
        mine = set((shards.rows(rank) // 512).tolist())
        assert mine == {c for c, r in owner.items() if r == rank}
        assert Pieces.cut(row, shards).area[rank] == sum(chunks[c] for c in mine)


def test_the_table_names_every_layout(capsys):
    result = run_layout_bench([Case("sqlite3_doc", 8192, 8192, 2)], packs=2, layouts=SOME)
    print_layouts(result, Console(width=100))
    shown = capsys.readouterr().out
    assert all(name in shown for name in SOME)
    assert "sqlite3_doc: 8,192 tokens" in shown
    assert result["sources"]["sqlite3_doc"]
