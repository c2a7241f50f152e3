"""The watch bench runs the real trainer and accounts for every part of the watching."""

import io
import json

import pytest
import torch
from rich.console import Console

from longpack.bench import watch
from longpack.bench.lengths import pack_row
from longpack.bench.watch import count_large_row, run_watch_bench
from longpack.cli.bench_watch import print_watch
from longpack.plan import plan_step
from longpack.train.metrics import loads_of, read_metrics

PARTS = {
    "attention calls and loads",
    "gradient norm",
    "traffic and waste",
    "line of metrics",
    "fire counter",
}


@pytest.fixture
def small(monkeypatch):
    model = {**watch.MODEL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    monkeypatch.setattr(watch, "MODEL", model)


def test_the_bench_times_every_part_and_prints_it(small):
    threads = torch.get_num_threads()
    result = run_watch_bench(steps=2, row_tokens=128, worlds=(1,))
    assert torch.get_num_threads() == threads
    assert json.loads(json.dumps(result)) == result
    told = result["cp"]["1"]
    assert set(told["parts"]) == PARTS
    assert all(set(part) == {"median_ms", "share"} for part in told["parts"].values())
    console = Console(file=io.StringIO(), width=100)
    print_watch(result, console)
    text = console.file.getvalue()
    assert f"{told['step_ms']:.1f}" in text
    assert f"{told['share']:.4%}" in text


def test_two_ranks_train_the_steps_that_are_timed(tmp_path):
    watch._write_documents(tmp_path / "documents.jsonl", 4 * 128)
    spent = watch._run(2, str(tmp_path), steps=2, row_tokens=128)
    assert {name: len(times) for name, times in spent.items()} == dict.fromkeys(PARTS | {"step"}, 2)
    records = read_metrics(tmp_path / "cp2" / "metrics.jsonl")
    assert [r["attention_calls"] for r in records] == [6] * (2 + watch.WARMUP)


def test_shares_are_paired_within_steps():
    """The second step is 10 times as long for both: shares of a step stay what they are."""
    spent = {"step": [10.0, 100.0, 10.0], "a": [1.0, 10.0, 1.0], "b": [2.0, 20.0, 3.0]}
    told = watch._figures(spent)
    assert told["step_ms"] == 10.0
    assert told["parts"]["a"] == {"median_ms": 1.0, "share": pytest.approx(0.1)}
    assert told["parts"]["b"]["share"] == pytest.approx(0.2)  # the median of 0.2, 0.2 and 0.3
    assert told["share"] == pytest.approx(0.3)


def test_a_large_row_is_counted_from_a_fresh_plan_each_time(monkeypatch):
    """A plan keeps what is computed from it, so one plan would be counted only once."""
    counted = []

    def count(plans):
        counted.extend(plans)
        return loads_of(plans)

    monkeypatch.setattr(watch, "loads_of", count)
    told = count_large_row(row_tokens=4096, world_size=4)
    assert set(told) == {"tokens", "world_size", "plan_ms", "count_ms"}
    assert (told["tokens"], told["world_size"]) == (4096, 4)
    row = pack_row(watch.CORPUS, 4096, seed=0)
    assert set(counted) == {plan_step(row, 4, "balanced", "a2a")}
    assert len({id(plan) for plan in counted}) == len(counted) == 7
