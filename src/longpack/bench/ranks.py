"""Attention of one packed row over gloo ranks, against what people do today."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from longpack import PackedRow, plan_step
from longpack.bench.contenders import (
    HEADS,
    KV_HEADS,
    LOOP,
    Attend,
    Problem,
    dense_mask,
    difference_of_rank,
    document_loop,
    largest_difference,
    longpack_step,
    require_equal,
    too_different,
)
from longpack.bench.lengths import pack_row
from longpack.bench.rivals import Ring, Ulysses
from longpack.bench.timing import (
    PROCESSOR,
    WALL,
    Times,
    clock_in_turn,
    machine,
    medians,
    on_threads,
    ratio,
    take_turns,
)
from longpack.collectives import Delayed, Transport, as_transport
from longpack.errors import PlanError, UnsupportedError
from longpack.plan import Plan
from longpack.testing.ranks import World

LAYOUTS = {  # contender: layout, exchange, options of its step
    "balanced_a2a": ("balanced", "a2a", {}),
    "balanced_a2a_waited": ("balanced", "a2a", {"overlap": False}),
    "contiguous_allgather": ("contiguous", "allgather", {}),
    "zigzag_a2a": ("zigzag", "a2a", {}),
}
RIVALS = {"ring": "head_tail", "ulysses": "contiguous"}  # and the layout of their rows
BASE, DENSE_ALONE = "balanced_a2a", "dense_mask_two_threads"
ALONE = {LOOP: (document_loop, 1), DENSE_ALONE: (dense_mask, 2)}  # and their threads
NAMES = (*LAYOUTS, *RIVALS, LOOP)
DIVISIBLE_HEADS = (8, 4)  # for Ulysses on two and four ranks, which cannot deal 3 K/V heads
DENSE_ROUNDS = 3  # each takes tens of seconds at 16K rows
SEEDS = 1000  # tried for an uneven row


@dataclass(frozen=True)
class Contender:
    """One forward and backward, ready to run.

    Args:
        run: returns output and gradients.
        plan: says whose rows they are; None where one process has the whole row.
    """

    run: Callable[[], list[torch.Tensor]]
    plan: Plan | None


@dataclass(frozen=True)
class Pass:
    """What runs with one number of heads.

    Args:
        heads: of queries, and of keys and values.
        names: contenders.
        rounds: timed rounds.
        dense: also time a dense mask.
        delay_ms: of the slow link; None to leave it out.
    """

    heads: tuple[int, int]
    names: Sequence[str]
    rounds: int
    dense: bool = False
    delay_ms: float | None = None


def run_ranks_bench(
    tokens: int = 16384,
    world_size: int = 2,
    rounds: int = 7,
    seed: int = 0,
    longest: int | None = None,
    dense: bool = True,
    delay_ms: float = 40.0,
    only: Sequence[str] = (),
    least_imbalance: float = 1.0,
) -> dict[str, Any]:
    """Compare forward and backward of one row over ranks of one thread each, fp32.

    Contenders take turns, start together at a barrier, and count until the slowest rank is done;
    those of one process run on rank 0 while the others sleep. Ulysses is compared once more, with
    heads that it can deal to ranks. Results are compared for equality before anything is timed.
    Processor time, of the rank that uses most, is compared too: it shows how work is split even
    where other programs disturb the machine.

    Args:
        tokens: rows of the packed row.
        world_size: gloo ranks.
        rounds: timed rounds; figures are medians over rounds, ratios of paired times.
        seed: picks the documents.
        longest: longer documents are cut; a quarter of the row by default.
        dense: also time one call with a dense mask, on one process with two threads.
        delay_ms: of the link that shows how much of the exchange is hidden.
        only: contenders to time beside `balanced_a2a`; all by default.
        least_imbalance: take the first seed from `seed` on whose row has at least this area
            max/mean in the contiguous layout.

    Raises:
        UnsupportedError: names in `only` that there are not.
        PlanError: no such row among a thousand seeds.
        ResultError: contenders do not compute the same.
    """
    names = _chosen(only)
    seed, row = _pick_row(tokens, longest or tokens // 4, world_size, seed, least_imbalance)
    slow_link = delay_ms if "balanced_a2a_waited" in names else None
    passes = [Pass((HEADS, KV_HEADS), names, rounds, dense, slow_link)]
    if "ulysses" in names:
        passes.append(Pass(DIVISIBLE_HEADS, (BASE, "ulysses"), rounds))
    world = World.start(world_size, collective_timeout_s=600)
    try:
        first, *more = (_run_pass(world, row, each) for each in passes)
    finally:
        world.kill()
    plans = {n: plan_step(row, world_size, *LAYOUTS[n][:2]) for n in names if n in LAYOUTS}
    return {
        "machine": machine() | {"threads": 1, "ranks": world_size},
        "row": {
            "tokens": row.length,
            "lengths": list(row.lengths),
            "area": row.area,
            "seed": seed,
        },
        "square_over_area": row.length**2 / row.area,
        "imbalance": {name: plan.imbalance for name, plan in plans.items()},
        "received_tokens": {name: max(p.received_tokens) for name, p in plans.items()},
        "largest_difference": max(
            max(per_rank[0]["differences"].values()) for per_rank in (first, *more)
        ),
        **_figures(first),
        "divisible_heads": {"heads": DIVISIBLE_HEADS, **_figures(more[0])} if more else None,
        "not_run": first[0]["not_run"],
        "delay_ms": slow_link,
        "exposed_ms": {
            name: max(rank["exposed_ms"][name] for rank in first) for name in first[0]["exposed_ms"]
        },
    }


def _chosen(only: Sequence[str]) -> tuple[str, ...]:
    unknown = sorted(set(only) - set(NAMES))
    if unknown:
        raise UnsupportedError(
            f"there is no contender {', '.join(unknown)}: only= takes {', '.join(NAMES)}"
        )
    return tuple(n for n in NAMES if n == BASE or not only or n in only)


def _pick_row(
    tokens: int, longest: int, world_size: int, seed: int, least_imbalance: float
) -> tuple[int, PackedRow]:
    for tried in range(seed, seed + SEEDS):
        row = pack_row("sqlite3_doc", tokens, tried, longest=longest)
        if plan_step(row, world_size, "contiguous", "allgather").imbalance >= least_imbalance:
            return tried, row
    raise PlanError(
        f"none of {SEEDS} rows of {tokens} tokens with documents of at most {longest} is as uneven "
        f"as {least_imbalance} on {world_size} ranks: lower least_imbalance or raise longest"
    )


def _over_base(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: ratio(times, name, BASE) for name in times if name != BASE}


def _figures(per_rank: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    times, slow = _slowest(per_rank, WALL), _slowest(per_rank, WALL, "dense_times")
    return {
        "median_ms": medians(slow | times),
        "over_balanced": _over_base(times) | _over_base(slow),
        "processor_over_balanced": _over_base(_slowest(per_rank, PROCESSOR)),
    }


def _slowest(
    per_rank: list[dict[str, Any]], clock: str, which: str = "times"
) -> dict[str, list[float]]:
    """Times by contender, of the rank that took longest, round by round."""
    return {
        name: list(map(max, zip(*(r[which][clock][name] for r in per_rank), strict=True)))
        for name in per_rank[0][which][clock]
    }


def _run_pass(world: World, row: PackedRow, this: Pass) -> list[dict[str, Any]]:
    """Return what every rank found in a pass.

    Raises:
        ResultError: contenders do not compute the same.
    """
    per_rank = world.run(_compete, row, this, timeout_s=3600)
    require_equal(per_rank[0]["differences"])
    return per_rank


def _compete(rank: int, world_size: int, row: PackedRow, this: Pass) -> dict[str, Any]:
    """One rank's part of a pass: check every contender, then time them in turn.

    Every rank sees the differences of all, so that all of them go on to the timing, or none.
    """
    transport = as_transport(dist.group.WORLD)
    problem = Problem.of(row.length, this.heads)
    runs, not_run = _build(row, this, problem, transport)
    differences = _differences(runs, problem.run(document_loop(row)), transport)
    found = {"differences": differences, "not_run": not_run}
    if too_different(differences):
        return found
    by_dense = {name: runs[name] for name in (BASE, DENSE_ALONE)} if this.dense else {}
    runs.pop(DENSE_ALONE, None)
    exposed = {}
    if this.delay_ms is not None:
        exposed = _exposed(problem, row, transport, this.delay_ms, this.rounds)
    return found | {
        "times": _time(runs, this.rounds, rank),
        "dense_times": _time(by_dense, DENSE_ROUNDS, rank),
        "exposed_ms": exposed,
    }


def _build(
    row: PackedRow, this: Pass, problem: Problem, transport: Transport
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders, and why the others cannot run."""
    runs, not_run = {}, {}
    for name in (*this.names, *([DENSE_ALONE] if this.dense else [])):
        try:
            runs[name] = _contender(name, row, this.heads, problem, transport)
        except UnsupportedError as reason:
            not_run[name] = str(reason)
    return runs, not_run


def _contender(
    name: str, row: PackedRow, heads: tuple[int, int], problem: Problem, transport: Transport
) -> Contender:
    """Build one rank's part of a contender.

    Raises:
        UnsupportedError: it cannot run with these heads.
    """
    if name in ALONE:
        make, threads = ALONE[name]
        return Contender(partial(_run_on_threads, threads, problem, make(row)), None)
    if name in LAYOUTS:
        layout, exchange, options = LAYOUTS[name]
        plan = plan_step(row, transport.world_size, layout, exchange)
        attend = longpack_step(plan, transport, **options)
    else:
        plan = plan_step(row, transport.world_size, RIVALS[name], "a2a")
        rival = Ring(plan, transport) if name == "ring" else Ulysses(row, transport, *heads)
        attend = _on_rows(rival)
    return Contender(partial(problem.shard(plan, transport.rank).run, attend), plan)


def _run_on_threads(threads: int, problem: Problem, attend: Attend) -> list[torch.Tensor]:
    with on_threads(threads):
        return problem.run(attend)


def _on_rows(attend: Callable[..., torch.Tensor]) -> Attend:
    """Serve `[1, H, n, D]` with attention of `[n, H, D]`."""
    return lambda qkv: attend(*(t.squeeze(0).transpose(0, 1) for t in qkv)).transpose(0, 1)[None]


def _differences(
    runs: dict[str, Contender], expected: list[torch.Tensor], transport: Transport
) -> dict[str, float]:
    """Return the difference of every contender on every rank, the same on all of them."""
    mine = {
        name: _difference(contender, expected, transport.rank)
        for name, contender in runs.items()
        if contender.plan or transport.rank == 0
    }
    everyone = transport.all_gather_object(mine)
    return {
        f"{name} on rank {rank}": difference
        for rank, differences in enumerate(everyone)
        for name, difference in differences.items()
    }


def _difference(contender: Contender, expected: list[torch.Tensor], rank: int) -> float:
    found = contender.run()
    if contender.plan is None:
        return largest_difference(found, expected)
    return difference_of_rank(found, expected, contender.plan, rank)


def _time(runs: dict[str, Contender], rounds: int, rank: int) -> dict[str, Times]:
    """Time each contender from a barrier on; those of one process run on rank 0."""
    calls = {
        name: contender.run if contender.plan or rank == 0 else _sleep
        for name, contender in runs.items()
    }
    return clock_in_turn(calls, rounds, warmup=0, start=dist.barrier)


def _sleep() -> None:
    """Leave the machine to rank 0: the next barrier waits for it."""


def _exposed(
    problem: Problem, row: PackedRow, transport: Transport, delay_ms: float, rounds: int
) -> dict[str, float]:
    """Median milliseconds that a rank waits for arrivals over a link slowed by `delay_ms`."""
    plan = plan_step(row, transport.world_size, "balanced", "a2a")
    local = problem.shard(plan, transport.rank)

    def wait_ms(overlap: bool) -> float:
        link = Delayed(transport, delay_ms / 1e3)
        attend = longpack_step(plan, link, overlap=overlap)
        dist.barrier()
        local.run(attend)
        return link.exposed_s * 1e3

    modes = {"hidden": partial(wait_ms, True), "waited": partial(wait_ms, False)}
    return medians(take_turns(modes, rounds))
