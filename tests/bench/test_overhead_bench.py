"""The overhead bench: fixed cost is a difference, and its share one of a long call."""

import io
import json

import pytest
import torch
from rich.console import Console

from longpack.bench import overhead
from longpack.bench.contenders import Problem, document_loop, longpack_flash
from longpack.cli.bench_attention import print_overhead
from longpack.errors import ResultError
from longpack.packing import PackedRow


def test_the_kernels_alone_are_attention():
    problem = Problem.of(16)
    expected = problem.run(document_loop(PackedRow.from_lengths([16])))
    for ours, theirs in zip(overhead._Kernels(problem).run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_differences_are_within_a_round():
    assert overhead._median_difference([5.0, 9.0, 7.0], [1.0, 2.0, 6.0]) == 4.0


def test_fixed_costs_are_told_per_call_and_as_a_share_of_the_long_one(monkeypatch):
    """Given milliseconds of two calls each: longpack 4 beyond the kernels, torch 1."""
    given = [
        {
            "longpack_flash": [5.0, 9.0, 7.0],
            "torch": [2.0, 3.0, 7.0],
            "kernels": [1.0, 2.0, 6.0],
        },
        {"call": [80.0, 100.0, 300.0]},
    ]
    asked = []

    def times(contenders, rounds):
        asked.append(set(contenders))
        return given[len(asked) - 1]

    monkeypatch.setattr(overhead, "time_in_turn", times)
    result = overhead.run_overhead_bench(rounds=3, calls=2, long_tokens=256)
    assert asked == [set(each) for each in given]
    figures = ("kernels_us", "fixed_us", "torch_fixed_us", "long_call_ms", "share")
    assert [result[name] for name in figures] == pytest.approx([1000, 2000, 500, 100, 0.02])


def test_a_contender_runs_as_often_as_it_is_divided_by():
    ran = []
    overhead._repeat(lambda: ran.append(1), calls=7)()
    assert len(ran) == 7


def test_a_call_that_differs_from_the_kernels_is_not_timed(monkeypatch):
    def wrong(row):
        right = longpack_flash(row)
        return lambda qkv: right(qkv) * 1.01

    monkeypatch.setattr(overhead, "longpack_flash", wrong)
    with pytest.raises(ResultError, match=r"contenders differ: longpack_flash by 1\.0e-02"):
        overhead.run_overhead_bench(rounds=1, calls=1, long_tokens=256)


def test_the_bench_returns_plain_data_and_prints_it():
    result = overhead.run_overhead_bench(rounds=3, calls=2, long_tokens=256)
    assert json.loads(json.dumps(result)) == result
    console = Console(file=io.StringIO(), width=100)
    print_overhead(result, console)
    text = console.file.getvalue()
    assert f"{result['share']:.3%}" in text
    assert "(limit 3%)" in text
