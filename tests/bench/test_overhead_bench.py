"""The overhead bench: fixed cost is a difference, and its share one of a long call."""

import io
import json

import pytest
import torch
from rich.console import Console

from longpack.bench import overhead
from longpack.bench.contenders import Problem, document_loop
from longpack.cli.bench_attention import print_overhead
from longpack.packing import PackedRow


def test_the_kernels_alone_are_attention():
    problem = Problem.of(16)
    expected = problem.run(document_loop(PackedRow.from_lengths([16])))
    for ours, theirs in zip(overhead._Kernels(problem).run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_differences_are_within_a_round():
    assert overhead._median_difference([5.0, 9.0, 7.0], [1.0, 2.0, 6.0]) == 4.0


def test_the_bench_returns_plain_data_and_prints_it():
    result = overhead.run_overhead_bench(rounds=3, calls=2, long_tokens=256)
    assert json.loads(json.dumps(result)) == result
    share = result["fixed_us"] / 1e3 / result["long_call_ms"]
    assert result["share"] == pytest.approx(share)
    console = Console(file=io.StringIO(), width=100)
    print_overhead(result, console)
    text = console.file.getvalue()
    assert f"{result['share']:.3%}" in text
    assert "(limit 3%)" in text
