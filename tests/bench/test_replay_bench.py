"""The replay bench measures what it says."""

import io
import json

import pytest
from rich.console import Console

from longpack.bench import replay
from longpack.bench.replay import record_bytes, run_replay_bench
from longpack.cli.bench_replay import print_replay


def test_the_bench_returns_plain_data_and_prints_it() -> None:
    result = run_replay_bench(rounds=2)
    assert json.loads(json.dumps(result)) == result
    for name in ("call", "decision", "decision_preserve_random_false"):
        assert set(result[name]) == {"extra_us", "share_of_empty_block"}
    assert set(result["expert_dispatch_on_2_gloo_ranks"]) == {
        "replayed",
        "decided_twice",
        "saved_ms",
    }
    console = Console(file=io.StringIO(), width=100)
    print_replay(result, console)
    text = console.file.getvalue()
    assert f"empty checkpointed block: {result['empty_checkpointed_block_us']:.1f} us" in text
    assert f"{result['decision']['extra_us']:.1f}" in text
    assert "524,288" in text


def test_codecs_keep_an_eighth() -> None:
    for kept in record_bytes().values():
        assert kept["codec"] < kept["plain"] / 4 + 200
    assert record_bytes()["top 8 of 64 experts, 8,192 tokens"]["plain"] == 8192 * 8 * 8


def test_extra_time_is_paired_within_rounds_and_told_per_call() -> None:
    """100 calls a timing, here of 20 decisions; the third round is disturbed as a whole."""
    times = {"ours": [5.0, 7.0, 60.0], "base": [3.0, 3.0, 30.0], "plain": [1.0, 1.0, 10.0]}
    assert replay._extra(times, "ours", "base", 1) == pytest.approx(
        {"extra_us": 40.0, "share_of_empty_block": 3.0}
    )
    assert replay._extra(times, "ours", "base", 20) == pytest.approx(
        {"extra_us": 2.0, "share_of_empty_block": 0.15}
    )
