"""Rates are measured and feed the cost model; the straggler bench states what it predicts."""

import pytest

from longpack.bench import calibrate as bench
from longpack.bench.calibrate import SMALL, calibrate, run_straggler_bench
from longpack.bench.lengths import pack_row
from longpack.plan import CostModel, Machine, plan_step


def test_a_calibration_is_a_machine():
    result = calibrate(tokens=512, rounds=1)
    rates = Machine(**result["rates"])  # refuses rates that are not above zero
    flops = SMALL.pair_flops * 512 * 513 / 2
    assert rates.attention_flops_per_s == pytest.approx(flops / result["seconds"]["long"])
    assert rates.linear_flops_per_s == pytest.approx(2 * 1024**3 / result["seconds"]["linear"])
    assert rates.near_bytes_per_s == rates.far_bytes_per_s


def test_the_straggler_bench_predicts_from_plans():
    rates = Machine(attention_flops_per_s=1e9, segment_s=0.0)
    result = run_straggler_bench(tokens=1024, rounds=1, rates=rates)
    row = pack_row("sqlite3_doc", 1024, 0)
    assert set(result["slowest_rank_ms"]) == {"contiguous", "balanced"}
    for name in ("contiguous", "balanced"):
        plan = plan_step(row, 2, name, "a2a")
        cost = CostModel(SMALL, rates).predict(plan.shards, plan.pieces, "a2a")
        assert result["imbalance"][name] == plan.imbalance
        assert result["predicted_ms"][name] == pytest.approx(1e3 * cost.attention_s.max())
    areas = [max(plan_step(row, 2, n).area) for n in ("contiguous", "balanced")]
    assert result["predicted_ratio"] == pytest.approx(areas[0] / areas[1])


def test_the_slowest_rank_counts(monkeypatch):
    """Another rank is the slowest under each layout."""
    per_rank = [{"contiguous": 9.0, "balanced": 5.0}, {"contiguous": 3.0, "balanced": 6.0}]
    monkeypatch.setattr(bench, "_on_ranks", lambda *arguments: per_rank)
    rates = Machine(attention_flops_per_s=1e9, segment_s=0.0)
    result = run_straggler_bench(tokens=1024, rates=rates)
    assert result["slowest_rank_ms"] == {"contiguous": 9.0, "balanced": 6.0}
    assert result["measured_ratio"] == 1.5
