"""The attention bench compares three ways of attending one row, and prints them."""

import io
import json

from rich.console import Console

from longpack.bench.attention import run_attention_bench
from longpack.bench.contenders import CONTENDERS, TOLERANCE, document_loop
from longpack.bench.lengths import pack_row
from longpack.cli import main
from longpack.cli.bench_attention import print_attention


def test_the_bench_returns_plain_data_and_prints_it():
    result = run_attention_bench(tokens=256, rounds=2)
    assert json.loads(json.dumps(result)) == result
    row = pack_row("sqlite3_doc", 256, 0, longest=64)
    assert result["row"] == {"tokens": 256, "lengths": list(row.lengths), "area": row.area}
    assert set(result["median_ms"]) == {*CONTENDERS, "matmul"}
    assert result["largest_difference"] < TOLERANCE
    console = Console(file=io.StringIO(), width=100)
    print_attention(result, console)
    text = console.file.getvalue()
    assert f"longpack / document loop  {result['longpack_over_document_loop']:.3f}" in text


def test_a_wrong_contender_is_a_finding_with_one_message(monkeypatch, capsys):
    def wrong(row):
        right = document_loop(row)
        return lambda qkv: right(qkv) * 1.01

    monkeypatch.setitem(CONTENDERS, "dense_mask", wrong)
    assert main(["bench", "attention", "--tokens", "256", "--rounds", "1"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("longpack: contenders differ: dense_mask by 1.0e-02, relative to")
    assert said.err.count("\n") == 1
