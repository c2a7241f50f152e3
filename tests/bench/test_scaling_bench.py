"""The scaling bench: what is not a time is exact, and everything is printed and drawn."""

import io
import json
import sys

import pytest
from rich.console import Console

from longpack import plan_step
from longpack.bench import scaling
from longpack.bench.contenders import (
    CONTENDERS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    TOLERANCE,
    Problem,
    document_loop,
)
from longpack.bench.lengths import pack_row
from longpack.bench.memory import kept_bytes, peak_bytes, tells_peaks
from longpack.bench.scaling_plot import plot_scaling
from longpack.bench.thread_ranks import ThreadRanks
from longpack.cli import main
from longpack.cli.bench_scaling import print_scaling
from longpack.errors import ResultError

TOKENS, RANKS, SPLIT = (256, 512), (1, 2, 4), 1000


@pytest.fixture(scope="module")
def result():
    return scaling.run_scaling_bench(TOKENS, RANKS, SPLIT, rounds=2, memory=False)


def test_a_token_attends_as_many_keys_in_every_row():
    per_token = []
    for tokens in scaling.TOKENS:
        row = pack_row("sqlite3_doc", tokens, scaling.SEED, longest=scaling.LONGEST)
        per_token.append(row.area / row.length)
    assert max(per_token) / min(per_token) < 1.05


def test_over_tokens(result):
    assert json.loads(json.dumps(result)) == result
    assert [entry["tokens"] for entry in result["over_tokens"]] == list(TOKENS)
    for entry in result["over_tokens"]:
        row = pack_row("sqlite3_doc", entry["tokens"], scaling.SEED, longest=scaling.LONGEST)
        assert (entry["documents"], entry["area"]) == (len(row), row.area)
        assert entry["largest_difference"] < TOLERANCE
        assert {clock: set(times) for clock, times in entry["median_ms"].items()} == {
            "wall": set(CONTENDERS),
            "processor": set(CONTENDERS),
        }
        assert set(entry["over_loop"]) == {"wall", "processor"}
        assert entry["peak_bytes"] == {}


def test_over_ranks(result):
    row = pack_row("sqlite3_doc", SPLIT, scaling.SEED, longest=SPLIT // 4)
    for entry, world_size in zip(result["over_ranks"], RANKS, strict=True):
        plan = plan_step(row, world_size, "balanced", "a2a")
        assert entry["world_size"] == world_size
        assert entry["received_tokens"] == max(plan.received_tokens)
        assert entry["imbalance"] == plan.imbalance
        assert entry["largest_difference"] < TOLERANCE
        kept = [_kept(plan.local_length, r) for r in plan.received_tokens]
        assert entry["kept_bytes"] == max(kept)
    assert result["over_ranks"][0]["received_tokens"] == 0


class Clocked:
    """A world whose ranks tell given times."""

    def __init__(self, *rounds):
        self.rounds = iter(rounds)

    def clock(self):
        return [{"wall": wall, "processor": own} for wall, own in next(self.rounds)]


def test_a_split_is_compared_with_one_rank_within_rounds(monkeypatch):
    """Of two ranks the busiest makes the speed-up, their sum the work."""
    worlds = {
        1: Clocked([(9.0, 8.0)], [(20.0, 10.0)]),
        2: Clocked([(5.0, 4.0), (6.0, 5.0)], [(7.0, 4.0), (6.0, 6.0)]),
    }
    times = scaling._clock_in_turn(worlds, rounds=2)
    assert times == {
        "wall": {1: [9.0, 20.0], 2: [6.0, 7.0]},
        "busiest": {1: [8.0, 10.0], 2: [5.0, 6.0]},
        "total": {1: [8.0, 10.0], 2: [9.0, 10.0]},
    }
    monkeypatch.setattr(scaling, "_clock_in_turn", lambda worlds, rounds: times)
    row = pack_row("sqlite3_doc", 64, 0)
    one, two = scaling.scale_ranks(row, (1, 2), rounds=2, memory=False)
    assert two["median_ms"] == {"wall": 6.5, "busiest": 5.5, "total": 9.5}
    assert two["speed_up"] == pytest.approx((8 / 5 + 10 / 6) / 2)
    assert two["work"] == pytest.approx((9 / 8 + 10 / 10) / 2)
    assert (one["speed_up"], one["work"]) == (1.0, 1.0)


def _kept(rows, arrivals):
    """Query and output, K and V, lse, what arrived, and the token that names the step."""
    numbers = rows * (2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + HEADS)
    return 4 * (numbers + arrivals * 2 * KV_HEADS * HEAD_DIM) + 8


def test_a_dense_mask_is_left_out_where_it_needs_gigabytes():
    short = pack_row("sqlite3_doc", 8192, 0)
    assert "dense_mask" in scaling._contenders(short)
    assert "dense_mask" not in scaling._contenders(pack_row("sqlite3_doc", 8193, 0))


@pytest.mark.skipif(not tells_peaks(), reason="the system reports no peaks")
def test_a_peak_is_what_a_call_takes_for_a_while():
    megabytes = 64
    lifted = peak_bytes(lambda: bytearray(megabytes << 20)[::4096])
    assert lifted == pytest.approx(megabytes << 20, rel=0.2)


def test_wrong_rows_of_a_rank_are_not_timed():
    row = pack_row("sqlite3_doc", 64, 0)
    problem = Problem.of(row.length)
    ranks = ThreadRanks(plan_step(row, 2, "balanced", "a2a"), problem)
    expected = [t.clone() for t in problem.run(document_loop(row))]
    assert ranks.difference(expected) < TOLERANCE
    expected[2][:, 5] += 1.0
    with pytest.raises(ResultError, match=r"contenders differ: rank \d of 2 by"):
        ranks.difference(expected)


def test_the_tables_and_the_picture(result, tmp_path):
    console = Console(file=io.StringIO(), width=100)
    print_scaling(result, console)
    text = console.file.getvalue()
    assert "documents cut at 512 tokens" in text
    assert f"{result['over_ranks'][2]['speed_up']:.2f}" in text
    pytest.importorskip("matplotlib")
    path = plot_scaling(result, tmp_path / "scaling.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_told_before_minutes_of_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "scaling", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'longpack[plot]'" in capsys.readouterr().err


def test_what_is_kept_counts_a_storage_once():
    """A square saves its input twice, sums save nothing."""
    found = kept_bytes(
        Problem.of(64), lambda qkv: qkv[0] * qkv[0] + 0.0 * (qkv[1].sum() + qkv[2].sum())
    )
    assert found == 64 * HEADS * HEAD_DIM * 4
