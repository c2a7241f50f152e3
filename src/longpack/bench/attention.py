"""Attention of one packed row on one rank: against a loop over documents, and a dense mask."""

from functools import partial
from typing import Any

from longpack.bench.contenders import (
    CONTENDERS,
    DENSE,
    HEAD_DIM,
    HEADS,
    LONGPACK,
    LOOP,
    Problem,
    check_contenders,
)
from longpack.bench.lengths import pack_row
from longpack.bench.timing import machine, matmul, medians, ratio, time_in_turn


def run_attention_bench(tokens: int = 8192, rounds: int = 9, seed: int = 0) -> dict[str, Any]:
    """Compare forward and backward of one row of sqlite3-doc lengths, fp32, heads 9/3 of 64.

    No document is longer than a quarter of the row. Results are compared for equality before
    they are timed.

    Args:
        tokens: rows of the packed row.
        rounds: timed rounds; figures are medians over rounds.
        seed: picks the documents.

    Returns:
        Plain data: documents, times in ms, ratios, rates in GFLOP/s.

    Raises:
        ResultError: contenders do not compute the same.
    """
    row = pack_row("sqlite3_doc", tokens, seed, longest=tokens // 4)
    problem = Problem.of(row.length)
    attends = {name: make(row) for name, make in CONTENDERS.items()}
    difference = check_contenders(problem, attends)
    timed = {name: partial(problem.run, attend) for name, attend in attends.items()}
    times = time_in_turn({**timed, "matmul": matmul(1024)}, rounds)
    median_ms = medians(times)
    flops = 14 * row.area * HEADS * HEAD_DIM  # 4 + 10 a query-key pair
    rate, limit = (f / median_ms[n] / 1e6 for n, f in ((LONGPACK, flops), ("matmul", 2 * 1024**3)))
    return {
        "machine": machine(),
        "row": {"tokens": row.length, "lengths": list(row.lengths), "area": row.area},
        "largest_difference": difference,
        "median_ms": median_ms,
        "longpack_over_document_loop": ratio(times, LONGPACK, LOOP),
        "dense_mask_over_longpack": ratio(times, DENSE, LONGPACK),
        "attention_gflops": rate,
        "matmul_gflops": limit,
        "fraction_of_matmul_rate": flops / (2 * 1024**3) / ratio(times, LONGPACK, "matmul"),
    }
