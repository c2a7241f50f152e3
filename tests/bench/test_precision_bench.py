"""The precision bench measures errors of split bf16 calls in their right places."""

import io
import json

import pytest
import torch
from rich.console import Console

from longpack.bench import precision
from longpack.bench.contenders import Problem, document_loop
from longpack.cli.bench_attention import print_precision
from longpack.packing import PackedRow
from longpack.plan import plan_step


@pytest.mark.parametrize("layout", precision.LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 3])  # 3: the row is padded
def test_split_results_come_back_in_order(world_size, layout):
    """In fp64 a split is exact, so that every row must be where it belongs."""
    row = PackedRow.from_lengths([100])
    problem = Problem.of(row.length, dtype=torch.float64)
    found = precision._run_split(problem, plan_step(row, world_size, layout, "a2a"))
    for ours, theirs in zip(found, problem.run(document_loop(row)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_splits_are_about_as_precise_as_one_call():
    result = precision.run_precision_bench(tokens=256)
    assert json.loads(json.dumps(result)) == result
    assert result["row"]["dtype"] == "bfloat16"
    names = set(precision.RESULTS)
    assert set(result["single_error"]) == names
    assert all(1e-4 < error < 1e-2 for error in result["single_error"].values())
    assert [(s["world_size"], s["layout"]) for s in result["splits"]] == [
        (n, layout) for n in (2, 4) for layout in precision.LAYOUTS
    ]
    for split in result["splits"]:
        for name in names:
            error = split["error"][name]
            assert split["over_single"][name] == pytest.approx(error / result["single_error"][name])
            assert split["over_single"][name] < 2.0


def test_the_table_names_every_split():
    result = precision.run_precision_bench(tokens=64, world_sizes=(2,))
    console = Console(file=io.StringIO(), width=100)
    print_precision(result, console)
    text = console.file.getvalue()
    assert "one call" in text
    assert all(f"2 {layout}" in text for layout in precision.LAYOUTS)
    assert f"({result['splits'][0]['over_single']['grad_key']:.2f})" in text
