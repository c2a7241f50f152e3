"""The documents bench pairs longpack with a loop, and short documents with long ones."""

import io
import json

import pytest
import torch
from rich.console import Console

from longpack import PackedRow
from longpack.bench import contenders
from longpack.bench.documents import document_rows, run_documents_bench
from longpack.bench.timing import clock_in_turn, on_threads, time_in_turn
from longpack.cli.bench_attention import print_documents

ROWS = {
    "long": PackedRow.from_lengths([512, 100]),
    "short": PackedRow.from_lengths([30, 7, 1, 490]),
}


@pytest.fixture(scope="module")
def result():
    return run_documents_bench(rounds=2, rows=ROWS)


def test_rows_are_those_it_names():
    eight_k, equal, short, mixed = document_rows().values()
    assert (eight_k.length, max(eight_k.lengths)) == (8192, 2048)
    assert equal.lengths == (512,) * 32
    assert short.lengths == (27,) * 600
    assert len(mixed) == 600
    assert (min(mixed.lengths), max(mixed.lengths)) == (5, 49)


def test_the_bench_returns_plain_data(result):
    assert json.loads(json.dumps(result)) == result
    assert result["limits"] == {"over_loop": 1.02, "over_long_documents": 2.0}
    assert result["largest_difference"] < contenders.TOLERANCE
    for name, row in ROWS.items():
        told = result["rows"][name]
        assert (told["documents"], told["tokens"], told["area"]) == (len(row), row.length, row.area)
        assert set(told["over_loop"]) == {"wall", "processor"}
        for clock in ("wall", "processor"):
            assert set(told["median_ms"][clock]) == {"longpack", "document_loop"}
    assert result["rows"]["long"]["over_long_documents"] is None
    assert set(result["rows"]["short"]["over_long_documents"]) == {"wall", "processor"}


def test_the_table_has_a_line_for_each_row(result):
    console = Console(file=io.StringIO(), width=100)
    print_documents(result, console)
    text = console.file.getvalue()
    assert "/ loop (<= 1.02)" in text
    assert f"{result['rows']['short']['over_long_documents']['wall']:.2f}" in text
    assert all(name in text for name in ROWS)


def test_contenders_that_differ_are_not_timed(monkeypatch):
    def wrong(row):
        right = contenders.longpack_flash(row)
        return lambda qkv: right(qkv) * 1.01

    monkeypatch.setattr(
        "longpack.bench.documents.CONTENDERS", {"loop": contenders.document_loop, "longpack": wrong}
    )
    with pytest.raises(AssertionError, match="contenders differ by"):
        run_documents_bench(rounds=1, rows=ROWS)


def test_nobody_always_runs_first_and_warmup_is_not_counted():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = clock_in_turn(runs, rounds=2, warmup=1)
    assert "".join(order) == "ba" + "ab" + "ba"
    assert {clock: {n: len(t) for n, t in each.items()} for clock, each in times.items()} == {
        "wall": {"a": 2, "b": 2},
        "processor": {"a": 2, "b": 2},
    }
    assert set(time_in_turn(runs, rounds=1)) == {"a", "b"}


def test_threads_are_put_back_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="here"), on_threads(before + 1):
        fail_on(before + 1)
    assert torch.get_num_threads() == before


def fail_on(threads):
    assert torch.get_num_threads() == threads
    raise RuntimeError("here")
