"""The balanced layout: equal tokens, area within a tolerance, few received rows."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longpack import PackedRow, plan_step
from longpack.errors import PlanError
from longpack.plan import Pieces, count_traffic
from longpack.plan.layouts import LAYOUTS, balanced
from longpack.plan.layouts.balanced import why_uneven
from longpack.plan.layouts.fill import area_of, fill
from longpack.plan.layouts.trade import trade_down
from longpack.testing import packed_rows


def heavy_tailed(seed, documents=60, longest=40_000):
    """Document lengths with few long ones, as corpora have."""
    lengths = np.random.default_rng(seed).pareto(1.0, documents) * 300 + 1
    return PackedRow.from_lengths(lengths.astype(int).clip(1, longest))


def imbalance(row, shards):
    area = Pieces.cut(row, shards).area
    return area.max() * shards.world_size / area.sum() if area.any() else 1.0


def received(row, shards):
    pieces = Pieces.cut(row, shards)
    return int((pieces.needed - pieces.tokens).sum())


def check_balanced(row, world_size, tolerance):
    """Rows equal, tolerance met, or else no worse than zigzag and a reason."""
    shards = balanced(row, world_size, tolerance)
    held = [len(shards.rows(r)) for r in range(world_size)]
    assert held == [-(-row.length // world_size)] * world_size
    reached, reason = imbalance(row, shards), why_uneven(row, shards, tolerance)
    if reached <= tolerance:
        assert reason is None
    else:
        # only where tokens are too few, or one attends too much, for area to be divided finely
        assert row.tokens < 64 * world_size or tolerance < 1.05 or "no layout can" in reason
        assert f"{reached:.3f} times the mean" in reason
        assert reached <= imbalance(row, LAYOUTS["zigzag"](row, world_size))
    return shards


@given(
    packed_rows(max_documents=12, max_tokens=400),
    st.integers(1, 16),
    st.sampled_from([1.0, 1.01, 1.05, 1.2, 2.0]),
)
@settings(deadline=None, max_examples=500)
def test_any_row_is_balanced_or_says_why_not(row, world_size, tolerance):
    check_balanced(row, world_size, tolerance)


@pytest.mark.parametrize("world_size", [2, 3, 8, 32])
@pytest.mark.parametrize("seed", range(5))
def test_rows_with_long_documents_meet_the_tolerance(seed, world_size):
    row = heavy_tailed(seed)
    for tolerance in (1.01, 1.05, 1.2):
        shards = check_balanced(row, world_size, tolerance)
        assert imbalance(row, shards) <= tolerance
        assert received(row, shards) < 0.7 * received(row, LAYOUTS["zigzag"](row, world_size))


@pytest.mark.parametrize("world_size", [2, 4, 8, 32])
def test_one_document_moves_no_more_than_zigzag_at_its_balance(world_size):
    row = PackedRow.from_lengths([131_072])
    zigzag = received(row, LAYOUTS["zigzag"](row, world_size))
    even = balanced(row, world_size, 1.0005)
    assert imbalance(row, even) <= 1.0005
    assert received(row, even) <= 1.001 * zigzag
    assert received(row, balanced(row, world_size, 1.05)) < 0.97 * zigzag


@pytest.mark.parametrize(("documents", "world_size"), [(4, 4), (8, 4), (24, 8)])
def test_equal_documents_that_fit_stay_whole(documents, world_size):
    row = PackedRow.from_lengths([1000] * documents)
    assert received(row, balanced(row, world_size)) == 0


def test_padding_is_dealt_so_that_area_stays_even():
    documents = PackedRow.from_lengths([9000, 400, 300, 200, 50, 20] * 2)
    row = documents.pad_to(2 * documents.length)
    shards = balanced(row, 8)
    assert shards.local_length == row.length // 8
    assert imbalance(row, shards) <= 1.05


def test_the_limit_is_used_up_to_save_traffic():
    """All ranks but two, which share what is left, come within a thousandth of it."""
    row = PackedRow.from_lengths([100_000])
    area = np.sort(Pieces.cut(row, balanced(row, 8, 1.05)).area)
    assert (np.abs(area[2:] / (1.05 * row.area / 8) - 1) < 1e-3).all()


def test_fill_takes_from_the_end_what_the_limit_allows():
    """One document of 100 on two ranks: late rows u with the first 50 - u reach the limit."""
    limit = area_of(0, 100) // 2
    runs = fill([100], 2, 50, limit, 1, 0.0, 0.0)
    of_rank = {r: sorted((x, y) for _, x, y, owner in runs if owner == r) for r in (0, 1)}
    assert sorted(of_rank.values()) == [[(0, 25), (75, 100)], [(25, 75)]]


def test_trades_keep_tokens_equal_and_end_at_the_limit():
    row = heavy_tailed(3)
    before = LAYOUTS["contiguous"](row, 8)
    limit = int(1.05 * row.area / 8)
    after = trade_down(row, before, limit, steps=100)
    assert imbalance(row, before) > 1.5
    assert Pieces.cut(row, after).area.max() <= limit
    assert after.local_length == before.local_length
    assert trade_down(row, after, limit, steps=100) is after


def test_every_process_finds_the_same():
    """No clock, no hash seed: another process plans the same digest."""
    code = (
        "from longpack import PackedRow, plan_step;"
        "row = PackedRow.from_lengths([9000, 4000, 500, 300, 200, 100, 50] * 3);"
        "print(plan_step(row, 8, 'balanced').digest)"
    )
    row = PackedRow.from_lengths([9000, 4000, 500, 300, 200, 100, 50] * 3)
    ours = plan_step(row, 8, "balanced").digest
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == ours


def test_the_tolerance_is_part_of_the_name():
    row = heavy_tailed(1)
    loose, default = plan_step(row, 8, "balanced:1.2"), plan_step(row, 8, "balanced")
    assert default.imbalance <= 1.05 < loose.imbalance <= 1.2
    assert sum(loose.pieces.needed) < sum(default.pieces.needed)
    assert plan_step(row, 8, "balanced:1.05").shards.start.tolist() == default.shards.start.tolist()
    with pytest.raises(PlanError, match="only balanced takes a tolerance"):
        plan_step(row, 8, "zigzag:1.1")
    with pytest.raises(PlanError, match="only balanced takes a tolerance"):
        plan_step(row, 8, "balanced:much")
    for wrong in ("0.9", "nan", "inf"):
        with pytest.raises(PlanError, match=f"balanced:{wrong}.*a number of at least 1"):
            plan_step(row, 8, f"balanced:{wrong}")


def test_the_reason_names_what_no_layout_can_do():
    row = PackedRow.from_lengths([4])
    reason = why_uneven(row, balanced(row, 4), 1.05)
    assert "1.600 times the mean" in reason  # areas 1, 2, 3, 4: largest 4, mean 2.5
    assert "no layout can do better than 1.600" in reason
    assert plan_step(row, 4, "balanced").layout_reason == f"as asked, but {reason}"
    assert plan_step(row, 4, "balanced:1.7").layout_reason == "as asked"


def test_no_rank_sends_the_whole_start_of_a_long_document():
    """First rows lie on ranks that need them: the busiest sender sends what others receive."""
    row = PackedRow.from_lengths([60_000, *[500] * 150])
    shards = balanced(row, 8)
    traffic = count_traffic("a2a", shards, Pieces.cut(row, shards), 8)
    assert sum(shards.runs(rank)[0][0] < 14_000 for rank in range(8)) >= 6
    assert traffic.sent_near.max() < 1.1 * traffic.received_near.max()
