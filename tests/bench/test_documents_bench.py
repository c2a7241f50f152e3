"""The documents bench pairs longpack with a loop, and short documents with long ones."""

import io
import json

import pytest
from rich.console import Console

from longpack import PackedRow
from longpack.bench import contenders
from longpack.bench.documents import document_rows, run_documents_bench
from longpack.cli.bench_attention import print_documents
from longpack.errors import ResultError

ROWS = {
    "long": PackedRow.from_lengths([512, 100]),
    "short": PackedRow.from_lengths([30, 7, 1, 490]),
}


@pytest.fixture(scope="module")
def result():
    return run_documents_bench(rounds=2, rows=ROWS)


def test_rows_are_those_it_names():
    eight_k, equal, short, mixed, few = document_rows().values()
    assert (eight_k.length, max(eight_k.lengths)) == (8192, 2048)
    assert equal.lengths == (512,) * 32
    assert short.lengths == (27,) * 600
    assert len(mixed) == 600
    assert len(few) == 40
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
            assert set(told["median_ms"][clock]) == {"longpack_flash", "document_loop"}
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

    monkeypatch.setitem(contenders.CONTENDERS, "longpack_flash", wrong)
    with pytest.raises(ResultError, match=r"contenders differ: longpack_flash by 1\.0e-02"):
        run_documents_bench(rounds=1, rows=ROWS)
