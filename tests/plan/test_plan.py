"""Plans against brute force, for every layout and exchange, over any documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longpack import PackedRow, plan_step
from longpack.errors import PlanError
from longpack.plan import EXCHANGES, LAYOUTS
from longpack.testing import DANGEROUS_ROWS, packed_rows

ROWS = [pytest.param(row, id=name) for name, row in DANGEROUS_ROWS.items()]


def brute_force_needed(plan, rank):
    """Rows that a rank's queries attend to, one query at a time."""
    ids = np.zeros(plan.padded_length, dtype=int)
    ids[: plan.row.length] = plan.row.doc_ids()
    rows = plan.shards.rows(rank)
    return {
        key for query in rows if ids[query] for key in range(query + 1) if ids[key] == ids[query]
    }


def check_shards(plan):
    """Every row of the padded row lies on exactly one rank, ranks are equal, rows ascend."""
    held = [plan.shards.rows(r) for r in range(plan.world_size)]
    assert all(len(rows) == plan.local_length and (np.diff(rows) > 0).all() for rows in held)
    assert sorted(np.concatenate(held)) == list(range(plan.padded_length))
    assert plan.padded_length >= plan.row.length


def check_counts(plan):
    """Tokens and area per rank sum to the row's, and equal a count query by query."""
    ids = np.zeros(plan.padded_length, dtype=int)
    ids[: plan.row.length] = plan.row.doc_ids()
    first = {d: int(np.argmax(ids == d)) for d in set(ids.tolist()) - {0}}
    for rank in range(plan.world_size):
        real = [q for q in plan.shards.rows(rank) if ids[q]]
        assert plan.tokens[rank] == len(real)
        assert plan.area[rank] == sum(q - first[ids[q]] + 1 for q in real)
    assert sum(plan.area) == plan.row.area
    assert sum(plan.tokens) == plan.row.tokens


def check_segments(plan):
    """Segments name, row by row, exactly the keys that a query attends."""
    for rank in range(plan.world_size):
        rows, keys = plan.shards.rows(rank), sorted(brute_force_needed(plan, rank))
        seen = set()
        for q_start, q_stop, k_start, k_stop in plan.segments(rank):
            for i, q in enumerate(range(q_start, q_stop)):
                attended = keys[k_start : k_stop - (q_stop - q_start) + 1 + i]
                start = next(a for a, b in plan.row.documents if a <= rows[q] < b)
                assert attended == list(range(start, rows[q] + 1))
                seen.add(q)
        assert len(seen) == plan.tokens[rank]
        assert plan.segment_count[rank] == len(plan.segments(rank))


def check_transfers(plan):
    """Simulating the exchange on row numbers delivers the needed rows, in order, on every rank."""
    world = plan.world_size
    parts = [plan.transfers(r) for r in range(world)]
    held = [plan.shards.rows(r) for r in range(world)]
    for rank, part in enumerate(parts):
        if plan.kv_exchange == "allgather":
            landed = np.concatenate(held)
        else:
            arrived = []
            for source in range(world):
                offset = sum(parts[source].send_counts[:rank])
                count = parts[source].send_counts[rank]
                assert count == part.receive_counts[source]
                sent = parts[source].send_rows[offset : offset + count]
                arrived.append(held[source][sent])
            landed = np.concatenate([held[rank], *arrived])
            # the minimum: needed minus owned, no row twice, no row that is not needed
            needed = brute_force_needed(plan, rank)
            assert sorted(np.concatenate(arrived)) == sorted(needed - set(held[rank].tolist()))
        assert list(landed[part.key_rows]) == sorted(brute_force_needed(plan, rank))
        assert plan.received_tokens[rank] == sum(part.receive_counts)
        if plan.kv_exchange == "halo":
            assert all(c == 0 for s, c in enumerate(part.receive_counts) if s != rank - 1)


LAWS = (check_shards, check_counts, check_segments, check_transfers)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_laws_on_dangerous_rows(row, layout, exchange, world_size):
    plan = plan_step(row, world_size, layout, exchange)
    for law in LAWS:
        law(plan)


@given(
    packed_rows(max_documents=6, max_tokens=60),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(EXCHANGES),
    st.integers(1, 9),
)
def test_laws_on_any_row(row, layout, exchange, world_size):
    plan = plan_step(row, world_size, layout, exchange)
    for law in LAWS:
        law(plan)


def test_zigzag_rows_of_the_smallest_case():
    plan = plan_step(PackedRow.from_lengths([4, 4]), 2, "zigzag")
    assert plan.shards.rows(0).tolist() == [0, 3, 4, 7]


def test_head_tail_rows():
    plan = plan_step(PackedRow.from_lengths([8]), 2, "head_tail")
    assert [plan.shards.rows(r).tolist() for r in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("lengths", "world_size", "padded"),
    [([7], 2, 8), ([10], 4, 12), ([2999], 4, 3000), ([2], 3, 3), ([1], 8, 8)],
)
def test_rows_are_padded_up_to_equal_shards(lengths, world_size, padded):
    plan = plan_step(PackedRow.from_lengths(lengths), world_size)
    assert plan.padded_length == padded
    assert sum(plan.tokens) == sum(lengths)


def test_zigzag_pads_no_document():
    row = PackedRow.from_lengths([137, 2041, 89])
    plan = plan_step(row, 8, "zigzag")
    assert plan.padded_length == 2272  # ceil(2267 / 8) * 8: fewer padding rows than ranks
    assert max(plan.tokens) - min(plan.tokens) <= 1
    assert plan.imbalance < 1.01


def test_halo_becomes_a2a_for_every_rank_with_the_reason():
    row = PackedRow.from_lengths([9, 3])
    plan = plan_step(row, 4, kv_exchange="halo")
    assert plan.kv_exchange == "a2a"
    assert "3 rows" in plan.exchange_reason
    assert "document 0 starts 6 rows before rank 2" in plan.exchange_reason
    assert plan_step(PackedRow.from_lengths([5, 3, 4]), 4, kv_exchange="halo").kv_exchange == "halo"
    assert "contiguous" in plan_step(row, 4, "zigzag", "halo").exchange_reason


def test_rank_3_of_1024_is_planned_without_a_process_group():
    plan = plan_step(PackedRow.from_lengths([100_000, 48_576]), 1024, kv_exchange="a2a")
    part = plan.transfers(3)
    assert plan.local_length == 146  # ceil(148576 / 1024)
    assert sum(part.receive_counts) == plan.received_tokens[3] == 3 * 146
    assert plan.segments(3) == ((0, 146, 0, 4 * 146),)


def test_received_bytes_have_units():
    plan = plan_step(PackedRow.from_lengths([8]), 2, kv_exchange="a2a")
    assert plan.received_tokens == (0, 4)
    assert plan.received_bytes(num_kv_heads=3, head_dim=64, element_bytes=2) == (0, 4 * 3 * 128 * 2)
    assert plan.received_bytes(1, 192, 4, v_head_dim=128) == (0, 4 * 320 * 4)


def test_digest_tells_what_ranks_must_agree_on():
    base = plan_step(PackedRow.from_lengths([4, 4]), 2)
    same = plan_step(PackedRow.from_lengths([4, 4]), 2)
    assert base == same
    assert hash(base) == hash(same)
    others = [
        plan_step(PackedRow.from_lengths([5, 3]), 2),
        plan_step(PackedRow.from_lengths([4, 4]), 4),
        plan_step(PackedRow.from_lengths([4, 4]), 2, "zigzag"),
        plan_step(PackedRow.from_lengths([4, 4]), 2, kv_exchange="a2a"),
        plan_step(PackedRow.from_lengths([4, 3], padding=1), 2),
    ]
    assert len({p.digest for p in [base, *others]}) == 6


def test_unknown_names_are_refused_with_the_accepted_ones():
    row = PackedRow.from_lengths([4])
    with pytest.raises(PlanError, match=r"'ring'.*contiguous, head_tail, zigzag"):
        plan_step(row, 2, layout="ring")
    with pytest.raises(PlanError, match=r"'p2p'.*allgather, halo, a2a"):
        plan_step(row, 2, kv_exchange="p2p")
    with pytest.raises(PlanError, match="world_size=0"):
        plan_step(row, 0)
