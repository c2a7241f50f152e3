"""Time and memory of attention against tokens, and against ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from longpack import PackedRow, plan_step
from longpack.bench.contenders import (
    CONTENDERS,
    DENSE,
    LONGPACK,
    LOOP,
    Problem,
    check_contenders,
    document_loop,
    longpack_step,
)
from longpack.bench.lengths import pack_row
from longpack.bench.memory import measure_peaks, peak_bytes, tells_peaks, warm_up
from longpack.bench.thread_ranks import ThreadRanks
from longpack.bench.timing import (
    PROCESSOR,
    WALL,
    clock_in_turn,
    machine,
    medians,
    on_threads,
    ratio,
    take_turns,
)
from longpack.collectives import as_transport
from longpack.plan import Plan
from longpack.testing.ranks import World

TOKENS = (2048, 4096, 8192, 16384, 32768)
RANKS = (1, 2, 4)
LONGEST = 512  # with seed 1 a token attends 240 to 250 tokens on average in every row of TOKENS
DENSE_TOKENS = 8192  # a dense mask of more alone needs gigabytes
SEED = 1


def run_scaling_bench(
    tokens: Sequence[int] = TOKENS,
    ranks: Sequence[int] = RANKS,
    split_tokens: int = 16384,
    rounds: int = 5,
    memory: bool = True,
) -> dict[str, Any]:
    """Measure forward and backward against tokens on one rank, and against ranks on one row.

    fp32, heads 9/3 of 64, lengths of SQLite's documentation. Against tokens, documents are cut at
    512 tokens, so that a token attends as many others in every row; against ranks, at a quarter of
    the row, so that there is something to balance and to exchange. Results are compared for
    equality before they are timed.

    Args:
        tokens: rows of the packed rows.
        ranks: world sizes; the first is what the others are compared with.
        split_tokens: rows of the row that is split.
        rounds: timed rounds; figures are medians over rounds, ratios of paired times.
        memory: also measure peak memory, each in processes of its own.

    Returns:
        Plain data: an entry for each number of tokens, and for each number of ranks.

    Raises:
        ResultError: contenders, or the ranks of a split, do not compute the same.
    """
    memory = memory and tells_peaks()
    rows = [pack_row("sqlite3_doc", n, SEED, longest=LONGEST) for n in tokens]
    split = pack_row("sqlite3_doc", split_tokens, SEED, longest=split_tokens // 4)
    return {
        "machine": machine(),
        "over_tokens": scale_tokens(rows, rounds, memory),
        "over_ranks": scale_ranks(split, ranks, rounds, memory),
    }


def scale_tokens(rows: Sequence[PackedRow], rounds: int, memory: bool) -> list[dict[str, Any]]:
    """Time one rank on each row: longpack, a loop over documents, and a dense mask to 8K rows."""
    jobs = [(name, row) for row in rows for name in _contenders(row) if memory]
    peaks = dict(zip(jobs, measure_peaks(jobs), strict=True))
    return [
        _time_row(row, rounds)
        | {"peak_bytes": {name: peak for (name, of), peak in peaks.items() if of == row}}
        for row in rows
    ]


def _contenders(row: PackedRow) -> list[str]:
    return [n for n in CONTENDERS if n != DENSE or row.length <= DENSE_TOKENS]


def _time_row(row: PackedRow, rounds: int) -> dict[str, Any]:
    problem = Problem.of(row.length)
    attends = {name: CONTENDERS[name](row) for name in _contenders(row)}
    difference = check_contenders(problem, attends)
    runs = {name: partial(problem.run, attend) for name, attend in attends.items()}
    times = clock_in_turn(runs, rounds, warmup=0)  # the comparison has run them once
    return {
        "tokens": row.length,
        "documents": len(row),
        "area": row.area,
        "largest_difference": difference,
        "median_ms": {clock: medians(each) for clock, each in times.items()},
        "over_loop": {clock: ratio(each, LONGPACK, LOOP) for clock, each in times.items()},
    }


def scale_ranks(
    row: PackedRow, ranks: Sequence[int], rounds: int, memory: bool
) -> list[dict[str, Any]]:
    """Split one row over ranks that are threads of this process, `balanced` with `a2a`.

    Wall time cannot fall below the work over this machine's cores. So each rank's processor time
    is measured too, by the clock of its thread, on which torch runs forward and backward. The
    busiest rank's is what a step would take on a core for every rank and a link that costs
    nothing; the sum over that of one rank is what splitting adds to the work. Peaks of threads
    cannot be told apart: what autograd keeps is counted for each, and peaks are those of gloo
    ranks, which are processes.
    """
    problem = Problem.of(row.length)
    plans = {n: plan_step(row, n, "balanced", "a2a") for n in ranks}
    with on_threads(1):
        worlds = {n: ThreadRanks(plan, problem) for n, plan in plans.items()}
        expected = problem.run(document_loop(row))
        differences = {n: world.difference(expected) for n, world in worlds.items()}
        times = _clock_in_turn(worlds, rounds)
        kept = {n: max(world.kept_bytes()) for n, world in worlds.items()}
    return [
        {
            "world_size": n,
            "tokens": row.length,
            "documents": len(row),
            "area": row.area,
            "imbalance": plan.imbalance,
            "received_tokens": max(plan.received_tokens),
            "largest_difference": differences[n],
            "median_ms": {which: medians(each)[n] for which, each in times.items()},
            "speed_up": ratio(times["busiest"], ranks[0], n),
            "work": ratio(times["total"], n, ranks[0]),
            "kept_bytes": kept[n],
            "peak_bytes": _peak_of_ranks(plan) if memory else None,
        }
        for n, plan in plans.items()
    ]


def _clock_in_turn(
    worlds: dict[int, ThreadRanks], rounds: int
) -> dict[str, dict[int, list[float]]]:
    """Return milliseconds by world size, one a round: wall, the busiest rank's and all ranks'."""
    told = take_turns({n: world.clock for n, world in worlds.items()}, rounds)
    figures = {WALL: (max, WALL), "busiest": (max, PROCESSOR), "total": (sum, PROCESSOR)}
    return {
        which: {
            n: [over_ranks(rank[clock] for rank in ranks) for ranks in each]
            for n, each in told.items()
        }
        for which, (over_ranks, clock) in figures.items()
    }


def _peak_of_ranks(plan: Plan) -> int:
    """Return the peak bytes of the rank that needs most, beyond its inputs, in fresh processes."""
    world = World.start(plan.world_size)
    try:
        return max(world.run(_peak_of_rank, plan, timeout_s=300))
    finally:
        world.kill()


def _peak_of_rank(rank: int, world_size: int, plan: Plan) -> int:
    warm_up()
    problem = Problem.of(plan.local_length)
    attend = longpack_step(plan, as_transport(dist.group.WORLD))
    dist.barrier()  # connections are made before
    return peak_bytes(lambda: problem.run(attend))
