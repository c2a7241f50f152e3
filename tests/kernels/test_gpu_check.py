"""The GPU check, run with the CPU kernel, so that the script works when a GPU is at hand."""

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longpack.kernels import KERNELS, TILED, Segments, attend
from longpack.kernels.impl import flash_cpu
from longpack.packing import PackedRow
from longpack.plan import plan_step

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SPLITS = list(product((2, 4, 8), ("contiguous", "zigzag", "balanced")))


@pytest.fixture(scope="module")
def gpu_check():
    """The modules of the script, by name, imported as it imports them."""
    names = ("cases", "clock", "command", "merge_cost", "parity", "problems", "segment_cost")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield SimpleNamespace(**{n: importlib.import_module(f"gpu_check.{n}") for n in names})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the one command writes, and what it prints."""
    output = tmp_path_factory.mktemp("gpu_check") / "results.json"
    arguments = ["--cpu", "--quick", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu_check.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(output.read_text()), "printed": done.stdout, "asked": arguments}


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_one_command_says_what_ran_where(results):
    assert results["command"] == " ".join(["gpu_check.py", *results["asked"]])
    assert results["machine"]["packages"]["torch"]
    assert results["limit_s"] == 300
    assert results["took_s"] > 0
    assert set(results["not_run"]) == {"flash_attn", "flash_torch_cuda", "te"}
    assert results["left_out"] == []
    assert results["raised"] == {}
    for title in (
        "Parity",
        "Ranks in turn",
        "one more segment",
        "two merged parts",
        "merge_ alone",
    ):
        assert title in results["printed"]
    assert "limit 300 s: no timed case begins after 270 s" in results["printed"]
    assert "not run: te" in results["printed"]


def test_parity_covers_every_split(results):
    cases = {p["case"] for p in results["parity"]}
    splits = {"contiguous, cp 1"} | {f"{layout}, cp {cp}" for cp, layout in SPLITS}
    assert cases == splits | {f"{split}, in parts" for split in splits}
    assert all(p["kernel"] == "flash_cpu" and p["passed"] for p in results["parity"])
    assert len(results["parity"]) == len(cases) * 4 * 2  # heads, dtypes


def test_every_rank_of_every_split_is_timed(results):
    expected = [
        (row, *split) for split in [(1, "contiguous"), *SPLITS] for row in ("packed", "single")
    ]
    assert [(s["row"], s["cp"], s["layout"]) for s in results["splits"]] == expected
    for split in results["splits"]:
        assert [r["rank"] for r in split["ranks"]] == list(range(split["cp"]))
        assert all(r["forward_ms"] > 0 and r["backward_ms"] > 0 for r in split["ranks"])


def test_shares_are_those_of_the_plan(results):
    """Areas, segments and rows are the plan's, and areas add up to the row's."""
    for split in results["splits"]:
        about = results["rows"][split["row"]]
        row = PackedRow.from_lengths(about["lengths"], about["tokens"] - sum(about["lengths"]))
        plan = plan_step(row, split["cp"], split["layout"], kv_exchange="a2a")
        ranks = split["ranks"]
        assert tuple(r["area"] for r in ranks) == plan.area
        assert tuple(r["segments"] for r in ranks) == plan.segment_count
        assert all(r["query_rows"] == plan.local_length for r in ranks)
        assert [r["key_rows"] for r in ranks] == plan.pieces.needed.tolist()
        assert split["area"] == sum(n * (n + 1) // 2 for n in about["lengths"]) == about["area"]


def test_rates_follow_from_times(results):
    """Forward is two matrix products of 2 x 64 flops a pair and head, backward five."""
    whole = {s["row"]: s["sum_ms"] for s in results["splits"] if s["cp"] == 1}
    (causal,) = results["causal_call"]
    causal_ms = causal["forward_ms"] + causal["backward_ms"]
    for split in results["splits"]:
        flops = split["area"] * 7 * 2 * 64 * 9
        assert split["flops"] == flops
        times = [r["forward_ms"] + r["backward_ms"] for r in split["ranks"]]
        assert split["sum_ms"] == pytest.approx(sum(times))
        assert split["slowest_ms"] == max(times)
        assert split["tflops"] == pytest.approx(flops / sum(times) / 1e9)
        assert split["of_matmul"] == pytest.approx(split["tflops"] / results["matmul_tflops"])
        assert split["of_whole_call"] == pytest.approx(whole[split["row"]] / sum(times))
        if split["row"] == "single":
            assert split["of_causal_call"] == pytest.approx(causal_ms / sum(times))
        else:
            assert split["of_causal_call"] is None


def test_segment_cost_cuts_the_same_tokens(results):
    assert [s["lengths"] for s in results["segment_cost"]] == ["equal", "uneven"]
    for cost in results["segment_cost"]:
        assert [t["segments"] for t in cost["times"]] == results["sizes"]["segment_counts"]
    equal = [t["area"] for t in results["segment_cost"][0]["times"]]
    assert equal == [64 * 65 // 2, 2 * 32 * 33 // 2, 4 * 16 * 17 // 2, 8 * 8 * 9 // 2]


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_both_cuts_keep_every_token(gpu_check, count):
    for cut in gpu_check.segment_cost.LENGTHS.values():
        lengths = cut(128, count)
        assert len(lengths) == count
        assert sum(lengths) == 128
        assert min(lengths) >= 1


def test_the_fit_finds_what_a_segment_adds(gpu_check):
    """Times of 0.25 ms + 2e-6 ms a pair + 0.003 ms a segment give 3 us, whatever the area."""
    module = gpu_check.segment_cost
    times = []
    for count in (1, 8, 64, 512):
        area = sum(n * (n + 1) // 2 for n in module.uneven_lengths(8192, count))
        ms = 0.25 + 2e-6 * area + 0.003 * count
        times.append(module.SegmentTime(count, area, ms, 2 * ms))
    for of, expected in (("forward_ms", 3.0), ("backward_ms", 6.0)):
        us, misfit = module.fit(times, [getattr(t, of) for t in times])
        assert us == pytest.approx(expected, rel=1e-9)
        assert misfit < 1e-9
    times[-1] = replace(times[-1], forward_ms=2 * times[-1].forward_ms)
    assert module.fit(times, [t.forward_ms for t in times])[1] > 1e-3


def test_time_beyond_the_area(gpu_check):
    module = gpu_check.segment_cost
    times = [module.SegmentTime(1, 1000, 4.0, 6.0), module.SegmentTime(11, 100, 1.0, 1.5)]
    assert module.beyond_area_us(times) == pytest.approx(1e3 * (2.5 - 1.0) / 10)


def test_merging_is_timed_both_ways(results):
    (cost,) = results["merge_cost"]
    assert (cost["kernel"], cost["note"]) == ("flash_cpu", None)
    assert min(v for k, v in cost.items() if k.endswith("_ms")) > 0
    (op,) = results["merge_op"]
    out, lse = 64 * 9 * 64 * 4, 64 * 9 * 4
    assert op["bytes_moved"] == 3 * (out + lse)
    assert op["gb_per_s"] == pytest.approx(op["bytes_moved"] / op["ms"] / 1e6)


@pytest.mark.parametrize("tokens", [2, 7, 32])
def test_two_parts_attend_what_one_call_does(gpu_check, tokens):
    """What is timed is right: both ways give the same output, lse and gradients, in fp64."""
    module, problems = gpu_check.merge_cost, gpu_check.problems
    inputs = problems.Inputs.draw(tokens, problems.Heads(4, 2, 8, 8), torch.float64, "cpu")
    results = []
    for parts in (module.one_part(tokens), module.two_parts(tokens)):
        forward, backward = module.passes(TILED["flash_cpu"], parts, inputs)
        results.append([*forward(), *backward()])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-13)


def test_on_a_gpu_rounds_are_queued_and_events_tell_the_time(gpu_check, monkeypatch):
    """The host waits after the warm-up and at the end; times lie between a round's events."""
    log, clock_ms = [], iter([0.0, 9.0, 18.0, 20.0, 21.0, 24.0, 30.0, 33.0, 38.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_ms = next(clock_ms)

        def elapsed_time(self, later):
            assert log[-1] == "wait"
            return later.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    clock = gpu_check.clock.Clock("cuda", 2, time.monotonic() + 60)
    times = clock.median_ms(lambda: log.append("f"), lambda: log.append("b"))
    assert log == ["f", "b", "wait", "f", "b", "f", "b", "wait"]
    assert times == (2.0, 4.0)  # medians of 1 and 3, of 3 and 5; the warm-up took 9 and 9


def test_no_case_begins_once_the_time_is_used(gpu_check):
    """The case in which time runs out has its result; those after it are named."""
    module = gpu_check.cases
    clock = SimpleNamespace(spent=lambda: bool(ran) and ran[-1] == 1)
    ran = []
    cases = [module.Case("copy", f"case {n}", lambda _, n=n: ran.append(n) or n) for n in range(4)]
    measured = module.measure_all(iter(cases), clock)
    assert measured.results["copy"] == ran == [0, 1]
    assert measured.left_out == ["case 2", "case 3"]


@pytest.mark.parametrize(("seconds", "rounds"), [(60.0, 5), (0.0, 1)])
def test_a_clock_without_time_measures_once(gpu_check, seconds, rounds):
    """One round to warm up, then as many as asked for, or one where no time is left."""
    clock = gpu_check.clock.Clock("cpu", 5, time.monotonic() + seconds)
    calls = []
    forward_ms, backward_ms = clock.median_ms(lambda: calls.append("f"), lambda: calls.append("b"))
    assert calls == ["f", "b"] * (1 + rounds)
    assert forward_ms > 0
    assert backward_ms > 0


@pytest.mark.usefixtures("one_thread")
def test_without_time_every_timed_case_is_named(gpu_check, tmp_path, capsys, results, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    output = tmp_path / "results.json"
    arguments = ["--cpu", "--quick", "--limit-s", "0", "--output", str(output)]
    assert gpu_check.command.main(arguments) == 0
    found = json.loads(output.read_text())
    assert len(found["parity"]) == len(results["parity"])  # what proves is never left out
    sections = ("splits", "segment_cost", "merge_cost", "merge_op", "causal_call")
    assert all(found[s] == [] for s in sections)
    assert found["matmul_tflops"] is None
    assert len(found["left_out"]) == 2 + sum(len(results[s]) for s in sections)
    printed = capsys.readouterr().out
    for name in found["left_out"]:
        assert f"left out, no time: {name}" in printed
    assert "flash_cpu, 9/3 heads of 64, single row, cp 8 balanced" in found["left_out"]


def add_kernel(monkeypatch, attend_with):
    """Put a stand-in beside the real kernels: an adapter that attends in one call."""
    kernel = SimpleNamespace(
        NAME="stand_in", BACKEND="flash", reasons_against=lambda call: [], attend=attend_with
    )
    monkeypatch.setitem(KERNELS, "stand_in", kernel)


@pytest.mark.usefixtures("one_thread")
def test_a_kernel_that_attends_in_one_call_says_so(gpu_check, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    add_kernel(monkeypatch, KERNELS["dense"].attend)
    output = tmp_path / "results.json"
    assert gpu_check.command.main(["--cpu", "--quick", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    costs = {c["kernel"]: c for c in found["merge_cost"]}
    assert costs["stand_in"]["note"] == "attends in one call; nothing to merge"
    assert costs["stand_in"]["two_parts_forward_ms"] is None
    assert costs["flash_cpu"]["note"] is None
    assert "stand_in: attends in one call; nothing to merge" in capsys.readouterr().out
    for kernel in ("stand_in", "flash_cpu"):
        assert sum(s["kernel"] == kernel for s in found["splits"]) == 20
        assert {p["passed"] for p in found["parity"] if p["kernel"] == kernel} == {True}


@pytest.mark.usefixtures("one_thread")
def test_a_kernel_that_raises_is_a_finding(gpu_check, monkeypatch, tmp_path, capsys):
    """Others are still checked and timed."""

    def broken(query, key, value, segments, scale):
        raise TypeError("unexpected keyword argument 'cu_seqlens_q'")

    add_kernel(monkeypatch, broken)
    output = tmp_path / "results.json"
    assert gpu_check.command.main(["--cpu", "--quick", "--output", str(output)]) == 1
    found = json.loads(output.read_text())
    passed = {(p["kernel"], p["passed"]) for p in found["parity"]}
    assert passed == {("stand_in", False), ("flash_cpu", True)}
    message = "TypeError: unexpected keyword argument 'cu_seqlens_q'"
    assert {p["raised"] for p in found["parity"] if p["kernel"] == "stand_in"} == {message}
    assert {s["kernel"] for s in found["splits"]} == {"flash_cpu"}
    assert found["raised"]["stand_in, 9/3 heads of 64, packed row, cp 2 zigzag"] == message
    assert "RAISED stand_in" in capsys.readouterr().out


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("split", [(1, "contiguous"), (4, "balanced")])
def test_a_wrong_kernel_fails_the_check(gpu_check, monkeypatch, split):
    """Attention that forgets its last segment must not pass, on whichever rank."""
    parity, problems = gpu_check.parity, gpu_check.problems
    row = PackedRow.from_lengths([20, 12, 9], padding=3)
    judge = parity.Judge.of(row, problems.Heads(4, 2, 8, 8), torch.float32, "cpu")
    plan = problems.plan_split(row, *split)
    assert judge.check("flash_cpu", plan).passed

    def forgetful(kernel, query, key, value, segments):
        bounds = segments.bounds
        if len(bounds) > 1:
            segments = Segments(bounds[:-1], segments.num_queries, segments.num_keys)
        return attend(kernel, query, key, value, segments)

    monkeypatch.setattr(problems, "attend", forgetful)
    found = judge.check("flash_cpu", plan)
    assert not found.passed
    assert found.error_ratio["out"] > 1000


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("call", "worst"), [("forward_tiles", "out"), ("backward_tiles", "dkey")])
def test_a_kernel_that_is_wrong_in_parts_fails_only_there(gpu_check, monkeypatch, call, worst):
    """One that forgets what arrives."""
    parity, problems = gpu_check.parity, gpu_check.problems
    row = PackedRow.from_lengths([20, 12, 9], padding=3)
    judge = parity.Judge.of(row, problems.Heads(4, 2, 8, 8), torch.float32, "cpu")
    plan = problems.plan_split(row, 2, "contiguous")
    assert [p.passed for p in judge.checks("flash_cpu", plan)] == [True, True]
    real = getattr(flash_cpu, call)

    def forgetful(tiles, *args, **kwargs):
        if not any(tile.continues and not tile.causal for tile in tiles):
            real(tiles, *args, **kwargs)

    monkeypatch.setattr(flash_cpu, call, forgetful)
    whole, parts = judge.checks("flash_cpu", plan)
    assert whole.passed
    assert parts.case == "contiguous, cp 2, in parts"
    assert not parts.passed
    assert parts.error_ratio[worst] > 1000


@pytest.mark.usefixtures("one_thread")
def test_padding_that_is_not_zero_fails_the_check(gpu_check, monkeypatch):
    parity, problems = gpu_check.parity, gpu_check.problems
    row = PackedRow.from_lengths([20, 12], padding=4)
    judge = parity.Judge.of(row, problems.Heads(4, 2, 8, 8), torch.float32, "cpu")

    def untidy(*arguments):
        return attend(*arguments) + 1e-9

    monkeypatch.setattr(problems, "attend", untidy)
    found = judge.check("flash_cpu", problems.plan_split(row, 2, "contiguous"))
    assert not found.padding_is_zero
    assert not found.passed


def test_without_cuda_it_says_so(gpu_check, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "results.json"
    assert gpu_check.command.main(["--output", str(output)]) == 2
    assert "no CUDA device" in capsys.readouterr().out
    assert not output.exists()
