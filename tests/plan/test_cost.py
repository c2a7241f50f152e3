"""Traffic against the transfers it counts, and the cost model against its formulas."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longpack import PackedRow, plan_step
from longpack.errors import PlanError
from longpack.plan import (
    EXCHANGES,
    LAYOUTS,
    CostModel,
    LayerShape,
    Machine,
    count_traffic,
)
from longpack.plan.cost import CANDIDATES
from longpack.testing import DANGEROUS_ROWS, packed_rows

ROWS = [pytest.param(row, id=name) for name, row in DANGEROUS_ROWS.items()]


def counted_from_transfers(plan, ranks_per_node):
    """Received near and far, sent near and far, from every rank's own transfers."""
    table = np.zeros((4, plan.world_size), dtype=np.int64)
    for rank in range(plan.world_size):
        part = plan.transfers(rank)
        for other in range(plan.world_size):
            far = rank // ranks_per_node != other // ranks_per_node
            table[0 + far, rank] += part.receive_counts[other]
            table[2 + far, rank] += part.send_counts[other]
    return table


def check_traffic(plan, ranks_per_node):
    t = count_traffic(plan.kv_exchange, plan.shards, plan.pieces, ranks_per_node)
    counted = [t.received_near, t.received_far, t.sent_near, t.sent_far]
    expected = counted_from_transfers(plan, ranks_per_node)
    np.testing.assert_array_equal(np.stack(counted), expected)
    np.testing.assert_array_equal(t.near, np.maximum(expected[0], expected[2]))
    np.testing.assert_array_equal(t.far, np.maximum(expected[1], expected[3]))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_traffic_is_that_of_the_transfers(row, layout, exchange):
    for world_size, ranks_per_node in [(1, 1), (3, 2), (8, 4), (8, 8)]:
        check_traffic(plan_step(row, world_size, layout, exchange), ranks_per_node)


@given(
    packed_rows(max_documents=6, max_tokens=60),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(EXCHANGES),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_traffic_of_any_row(row, layout, exchange, world_size, ranks_per_node):
    check_traffic(plan_step(row, world_size, layout, exchange), ranks_per_node)


SHAPE = LayerShape(
    num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, linear_parameters=1000, element_bytes=2
)
MACHINE = Machine(
    attention_flops_per_s=1e6,
    segment_s=0.5,
    linear_flops_per_s=1e5,
    near_bytes_per_s=1e3,
    far_bytes_per_s=1e2,
    message_s=0.25,
    ranks_per_node=1,
)


def predict(plan, shape=SHAPE, machine=MACHINE):
    return CostModel(shape, machine).predict(plan.shards, plan.pieces, plan.kv_exchange)


def test_every_term_by_hand():
    """A document of 8 on two ranks: areas 10 and 26; rank 1 receives 4 rows from another node."""
    cost = predict(plan_step(PackedRow.from_lengths([8]), 2, kv_exchange="a2a"))
    # 4 heads * 4 * 8 = 128 FLOPs a pair forward, 3.5 times that in all; 2 passes of one segment
    np.testing.assert_allclose(
        cost.attention_s, [3 * (10 * 448 / 1e6 + 1.0), 3 * (26 * 448 / 1e6 + 1.0)], rtol=1e-14
    )
    # 2 * 2 heads * 8 * 2 bytes = 64 bytes a row, there and back; rank 0 sends what 1 receives
    np.testing.assert_allclose(cost.exchange_s, [3 * 2 * (4 * 64 / 1e2 + 0.25)] * 2, rtol=1e-14)
    assert cost.linear_s == pytest.approx(3 * 4 * 6 * 1000 / 1e5, rel=1e-14)
    parts = cost.attention_s.max() + cost.exchange_s.max() + cost.linear_s
    assert cost.step_s == pytest.approx(parts, rel=1e-14)


def test_recompute_adds_a_pass_of_everything():
    plan = plan_step(PackedRow.from_lengths([8]), 2, kv_exchange="a2a")
    once, twice = predict(plan), predict(plan, replace(SHAPE, recompute=True))
    assert twice.linear_s == pytest.approx(once.linear_s * 4 / 3)
    np.testing.assert_allclose(twice.exchange_s, once.exchange_s * 3 / 2)
    np.testing.assert_allclose(
        twice.attention_s - once.attention_s, 3 * (np.array([10, 26]) * 128 / 1e6 + 0.5)
    )


def test_near_links_carry_what_stays_in_the_node():
    plan = plan_step(PackedRow.from_lengths([8]), 2, kv_exchange="a2a")
    near = predict(plan, machine=replace(MACHINE, ranks_per_node=2))
    assert near.exchange_s.max() == pytest.approx(3 * 2 * (4 * 64 / 1e3 + 0.25))


def test_nothing_moves_without_a_straddle():
    cost = predict(plan_step(PackedRow.from_lengths([4, 4]), 2, kv_exchange="a2a"))
    assert cost.exchange_s.tolist() == [0.0, 0.0]


LONG = PackedRow.from_lengths([6000, 500, 400, 300, 200, 100, 50, 50, 400])


def auto(kv_exchange="a2a", shape=SHAPE, **rates):
    machine = replace(MACHINE, segment_s=0.0, message_s=0.0, **rates)
    return plan_step(LONG, 4, "auto", kv_exchange, CostModel(shape, machine))


def busiest_rows(plan):
    """Rows that the busiest rank receives or sends."""
    return count_traffic("a2a", plan.shards, plan.pieces, 1).far.max()


def test_auto_takes_the_shortest_predicted_step():
    chosen = auto(attention_flops_per_s=1e9)
    model = CostModel(
        SHAPE, replace(MACHINE, segment_s=0.0, message_s=0.0, attention_flops_per_s=1e9)
    )
    plans = [plan_step(LONG, 4, name, "a2a") for name in CANDIDATES]
    steps = [model.predict(p.shards, p.pieces, p.kv_exchange).step_s for p in plans]
    assert chosen.layout == CANDIDATES[int(np.argmin(steps))]
    assert f"{1e3 * min(steps):.4g} ms" in chosen.layout_reason
    assert all(name in chosen.layout_reason for name in CANDIDATES if name != chosen.layout)
    assert chosen == plan_step(LONG, 4, chosen.layout, "a2a")


def test_auto_follows_the_machine():
    """Slow links want few rows, slow attention wants balance, an all-gather makes rows free."""
    slow_links = auto(far_bytes_per_s=1e-3)
    slow_attention = auto(attention_flops_per_s=1.0)
    moved = {name: busiest_rows(plan_step(LONG, 4, name, "a2a")) for name in CANDIDATES}
    assert moved[slow_links.layout] == min(moved.values())
    assert min(moved.values()) < busiest_rows(slow_attention)
    assert slow_attention.imbalance < 1.01
    assert auto("allgather", attention_flops_per_s=1e3).imbalance < 1.01


def test_auto_tries_no_zigzag_of_millions_of_pieces():
    row = PackedRow.from_lengths([100] * 6000)
    assert "zigzag" not in plan_step(row, 128, "auto", "a2a").layout_reason


@pytest.mark.parametrize("rate", ["attention_flops_per_s", "far_bytes_per_s", "ranks_per_node"])
def test_rates_are_above_zero(rate):
    with pytest.raises(PlanError, match=f"{rate}=0 must be above 0"):
        replace(MACHINE, **{rate: 0})
