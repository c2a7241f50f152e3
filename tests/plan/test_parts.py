"""Parts: the local squares and the remote rectangles cover every query-key pair exactly once."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longpack import PackedRow, plan_step
from longpack.plan import LAYOUTS
from longpack.plan.parts import cut_parts
from longpack.plan.stages import StageCosts, choose_stages
from longpack.testing import DANGEROUS_ROWS, packed_rows


def arrivals(plan, parts):
    """Simulate the exchange: for each rank and stage, the rows that arrive, in reading order."""
    world = plan.world_size
    sent = {}
    for rank, stage in itertools.product(range(world), range(len(parts[0].stages))):
        part = parts[rank].stages[stage]
        rows = plan.shards.rows(rank)[part.send_rows]
        edges = np.cumsum([0, *part.send_counts])
        for peer in range(world):
            sent[rank, peer, stage] = rows[edges[peer] : edges[peer + 1]]
    out = []
    for rank in range(world):
        stages = []
        for number, part in enumerate(parts[rank].stages):
            parcels = [sent[source, rank, number] for source in range(world)]
            assert tuple(len(p) for p in parcels) == part.receive_counts
            rows = np.concatenate(parcels)
            stages.append(rows if part.reading is None else rows[part.reading])
        out.append(stages)
    return out


def check(row, world_size, layout, stages):
    plan = plan_step(row, world_size, layout, "a2a")
    parts = [cut_parts(plan, rank, stages) for rank in range(world_size)]
    everyone = np.concatenate([plan.shards.rows(r) for r in range(world_size)])
    pairs = []
    for rank, arrived in enumerate(arrivals(plan, parts)):
        mine = plan.shards.rows(rank)
        for start, stop, k_start, k_stop in parts[rank].local:
            assert (start, stop) == (k_start, k_stop)
            pairs += [(mine[q], mine[k]) for q in range(start, stop) for k in range(start, q + 1)]
        for part, rows in zip(parts[rank].stages, arrived, strict=True):
            assert (np.diff(rows) > 0).all()
            for q_start, q_stop, k_start, k_stop in part.remote:
                pairs += itertools.product(mine[q_start:q_stop], rows[k_start:k_stop])
        assert (everyone[parts[rank].gathered] == np.concatenate(arrived)).all()
        assert parts[rank].received == plan.received_tokens[rank]
    expected = {(q, k) for a, b in row.documents for q in range(a, b) for k in range(a, q + 1)}
    assert len(pairs) == len(expected)
    assert set(pairs) == expected
    sharing = [
        max(
            (
                list(itertools.chain(*(range(c, d) for *_, c, d in s.remote))).count(k)
                for k in range(s.received)
            ),
            default=0,
        )
        for p in parts
        for s in p.stages
    ]
    assert {p.shared for p in parts} == {max(sharing) > 1}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DANGEROUS_ROWS)
def test_parts_cover_every_pair_once(name, layout):
    for world_size, stages in itertools.product((1, 2, 3, 5), (1, 2, 3)):
        check(DANGEROUS_ROWS[name], world_size, layout, stages)


@given(
    packed_rows(max_documents=5, max_tokens=25),
    st.sampled_from(list(LAYOUTS)),
    st.integers(1, 5),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_parts_cover_every_pair_once_on_any_row(row, layout, world_size, stages):
    check(row, world_size, layout, stages)


def test_contiguous_rows_arrive_in_reading_order():
    plan = plan_step(PackedRow.from_lengths([100]), 4)
    for rank in range(4):
        (stage,) = cut_parts(plan, rank).stages
        assert stage.reading is None
        assert len(stage.remote) == (rank > 0)


def test_stages_pay_where_own_work_is_little_and_the_link_slow():
    """Two ranks, one document, contiguous: rank 1 receives 100 rows for its 100.

    Own rows make 5,050 pairs, arrivals 10,000. With 1 ns a pair and 200 ns a row, one stage is
    done at 20,000 + 10,000 ns; two at 20,000 + 5,000; four at 20,000 + 2,500, eight at 21,250.
    """
    plan = plan_step(PackedRow.from_lengths([200]), 2, "contiguous", "a2a")
    free = {"exchange_ns": 0.0, "merge_ns": 0.0}
    assert choose_stages(plan, StageCosts(1.0, 200.0, **free)) == 8
    assert choose_stages(plan, StageCosts(1.0, 20.0, **free)) == 1  # there before it is needed
    assert choose_stages(plan, StageCosts(1.0, 200.0, 0.0, 50.0)) == 2  # 5,000 ns a merge
    assert choose_stages(plan, StageCosts(1.0, 200.0, 6_000.0, 0.0)) == 1
    assert choose_stages(plan_step(plan.row, 2), StageCosts(1.0, 200.0, **free)) == 1


def test_on_the_measured_machine_one_stage_is_enough():
    row = PackedRow.from_lengths([6000, 300, 2000, 84])
    assert {choose_stages(plan_step(row, 2, layout, "a2a")) for layout in LAYOUTS} == {1}
    assert (
        choose_stages(plan_step(PackedRow.from_lengths([], padding=8), 3, "balanced", "a2a")) == 1
    )
