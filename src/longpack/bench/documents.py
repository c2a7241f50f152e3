"""Attention on one rank against a loop over documents, on rows of long and of short documents."""

from functools import partial
from typing import Any

import numpy as np

from longpack.bench.contenders import CONTENDERS, LONGPACK, LOOP, Problem, check_contenders
from longpack.bench.lengths import pack_row
from longpack.bench.timing import PROCESSOR, WALL, clock_in_turn, machine, medians, ratio
from longpack.packing import PackedRow

LOOP_LIMIT = 1.02  # time over the loop's
SHORT_LIMIT = 2.0  # time over that of as many tokens in documents of `LONG_TOKENS`
LONG_TOKENS = 512


def document_rows(seed: int = 0) -> dict[str, PackedRow]:
    """Return the rows: real lengths, equal long ones, equal and mixed short ones, and a few."""
    random = np.random.Generator(np.random.PCG64(seed))
    mixed, few = random.integers(5, 50, 600), random.integers(20, 65, 40)
    return {
        "8,192 tokens of SQLite's documentation": pack_row("sqlite3_doc", 8192, seed, longest=2048),
        "32 documents of 512": PackedRow.from_lengths([512] * 32),
        "600 documents of 27": PackedRow.from_lengths([27] * 600),
        "600 documents of 5 to 49": PackedRow.from_lengths(mixed.tolist()),
        "40 documents of 20 to 64": PackedRow.from_lengths(few.tolist()),
    }


def run_documents_bench(
    rounds: int = 15, seed: int = 0, rows: dict[str, PackedRow] | None = None
) -> dict[str, Any]:
    """Compare forward and backward with a loop over documents, fp32, heads 9/3 of 64.

    All rows take turns in one run. A row of documents shorter than 512 tokens is also compared
    with as many tokens in documents of 512. Results are compared for equality before they are
    timed.

    Args:
        rounds: timed rounds; figures are medians over rounds, ratios of paired times.
        seed: picks documents.
        rows: by name; those of `document_rows` by default.

    Returns:
        Plain data: by row, its documents, times in ms and ratios by clock (wall, processor).

    Raises:
        ResultError: contenders do not compute the same.
    """
    rows = document_rows(seed) if rows is None else rows
    cases = rows | {_relaid(n): _in_long_documents(r) for n, r in rows.items() if _is_short(r)}
    runs, differences = {}, {}
    for name, row in cases.items():
        problem = Problem.of(row.length)
        attends = {kind: CONTENDERS[kind](row) for kind in (LOOP, LONGPACK)}
        differences[name] = check_contenders(problem, attends)
        runs |= {f"{kind}: {name}": partial(problem.run, a) for kind, a in attends.items()}
    times = clock_in_turn(runs, rounds)
    return {
        "machine": machine(),
        "limits": {"over_loop": LOOP_LIMIT, "over_long_documents": SHORT_LIMIT},
        "largest_difference": max(differences.values()),
        "rows": {name: _told(name, row, times) for name, row in rows.items()},
    }


def _told(name: str, row: PackedRow, times: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    ours, loop, long = f"{LONGPACK}: {name}", f"{LOOP}: {name}", f"{LONGPACK}: {_relaid(name)}"
    over_long = {clock: ratio(times[clock], ours, long) for clock in times if _is_short(row)}
    return {
        "documents": len(row),
        "tokens": row.length,
        "area": row.area,
        "median_ms": {
            clock: {LONGPACK: medians(each)[ours], LOOP: medians(each)[loop]}
            for clock, each in times.items()
        },
        "over_loop": {clock: ratio(times[clock], ours, loop) for clock in (WALL, PROCESSOR)},
        "over_long_documents": over_long or None,
    }


def _is_short(row: PackedRow) -> bool:
    return max(row.lengths) < LONG_TOKENS


def _relaid(name: str) -> str:
    return f"{name}, as many tokens in documents of {LONG_TOKENS}"


def _in_long_documents(row: PackedRow) -> PackedRow:
    whole, rest = divmod(row.length, LONG_TOKENS)
    return PackedRow.from_lengths([LONG_TOKENS] * whole + ([rest] if rest else []))
