"""Attention of one packed row over gloo ranks, against what people do today."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from longpack import CpStep, PackedRow, cp_blockdiag_sdpa, plan_step
from longpack.bench.attention import HEAD_DIM, HEADS, KV_HEADS, Tensors, dense_mask, document_loop
from longpack.bench.lengths import pack_row
from longpack.bench.rivals import Ring, Ulysses
from longpack.bench.timing import machine, ratio
from longpack.collectives import Delayed, Transport, as_transport
from longpack.plan import Plan
from longpack.testing.ranks import World

LAYOUTS = {  # contender: layout, exchange, options of its step
    "balanced_a2a": ("balanced", "a2a", {}),
    "balanced_a2a_waited": ("balanced", "a2a", {"overlap": False}),
    "contiguous_allgather": ("contiguous", "allgather", {}),
    "zigzag_a2a": ("zigzag", "a2a", {}),
}
DIVISIBLE_HEADS = (8, 4)  # for Ulysses on two and four ranks, which cannot deal 3 K/V heads
DENSE_ROUNDS = 3  # each takes tens of seconds at 16K rows
TOLERANCE = 2e-4  # of fp32 results that are summed in different orders

Run = Callable[[], list[torch.Tensor]]
Times = dict[str, list[tuple[float, float]]]  # ms of wall and of this rank's processor
WALL, PROCESSOR = 0, 1


def run_ranks_bench(
    tokens: int = 16384,
    world_size: int = 2,
    rounds: int = 7,
    seed: int = 0,
    longest: int | None = None,
    dense: bool = True,
    delay_ms: float = 40.0,
) -> dict[str, Any]:
    """Compare forward and backward of one row over ranks of one thread each, fp32.

    Contenders take turns, start together at a barrier, and count until the slowest rank is done;
    those of one process run on rank 0 while the others sleep. Results are compared for equality
    before anything is timed. Processor time, of the rank that uses most, is compared too: it shows
    how work is split even where other programs disturb the machine.

    Args:
        tokens: rows of the packed row.
        world_size: gloo ranks.
        rounds: timed rounds; figures are medians over rounds, ratios of paired times.
        seed: picks the documents.
        longest: longer documents are cut; a quarter of the row by default.
        dense: also time one call with a dense mask, on one process with two threads.
        delay_ms: of the link that shows how much of the exchange is hidden.
    """
    row = pack_row("sqlite3_doc", tokens, seed, longest=longest or tokens // 4)
    world = World.start(world_size, collective_timeout_s=600)
    try:
        options = {"rounds": rounds, "dense": dense, "delay_ms": delay_ms}
        per_rank = world.run(_compete, row, (HEADS, KV_HEADS), options, timeout_s=3600)
        options = {"rounds": rounds, "dense": False, "delay_ms": None}
        divisible = world.run(_compete, row, DIVISIBLE_HEADS, options, timeout_s=3600)
    finally:
        world.kill()
    times, even = _slowest(per_rank), _slowest(divisible)
    slow = _slowest(per_rank, "dense_times")
    busy = _slowest(per_rank, clock=PROCESSOR)
    best = "balanced_a2a"
    plans = {n: plan_step(row, world_size, layout, x) for n, (layout, x, _) in LAYOUTS.items()}
    return {
        "machine": machine() | {"threads": 1, "ranks": world_size},
        "row": {"tokens": row.length, "lengths": list(row.lengths), "area": row.area},
        "square_over_area": row.length**2 / row.area,
        "imbalance": {name: plan.imbalance for name, plan in plans.items()},
        "received_tokens": {name: max(p.received_tokens) for name, p in plans.items()},
        "largest_difference": max(r["largest_difference"] for r in (*per_rank, *divisible)),
        "median_ms": {n: statistics.median(t) for n, t in (slow | times).items()},
        "balanced_over_document_loop": ratio(times, best, "document_loop"),
        "over_balanced": {n: ratio(t, n, best) for t in (times, slow) for n in t if n != best},
        "processor_over_balanced": {n: ratio(busy, n, best) for n in busy if n != best},
        "divisible_heads": {
            "heads": DIVISIBLE_HEADS,
            "median_ms": {name: statistics.median(t) for name, t in even.items()},
            "over_balanced": {n: ratio(even, n, best) for n in even if n != best},
        },
        "not_run": per_rank[0]["not_run"],
        "delay_ms": delay_ms,
        "exposed_ms": {
            name: max(rank["exposed_ms"][name] for rank in per_rank)
            for name in per_rank[0]["exposed_ms"]
        },
    }


def _slowest(
    per_rank: list[dict[str, Any]], which: str = "times", clock: int = WALL
) -> dict[str, list[float]]:
    """Times by contender, of the rank that took longest, round by round."""
    return {
        name: [
            max(t[clock] for t in each)
            for each in zip(*(r[which][name] for r in per_rank), strict=True)
        ]
        for name in per_rank[0][which]
    }


def _compete(
    rank: int, world_size: int, row: PackedRow, heads: tuple[int, int], options: dict[str, Any]
) -> dict[str, Any]:
    """One rank's part: check every contender, then time them in turn."""
    transport = as_transport(dist.group.WORLD)
    tensors = _whole(row, heads)
    runs: dict[str, Run] = {}
    expected = _run(document_loop(row), tensors)
    worst = 0.0
    not_run = {}
    for name, (layout, exchange, step_options) in LAYOUTS.items():
        plan = plan_step(row, world_size, layout, exchange)
        step = CpStep.make(plan, transport, attn_backend="flash", **step_options)
        attend = partial(cp_blockdiag_sdpa, enable_gqa=True, step=step)
        runs[name] = partial(_run, _spread(attend), _local(tensors, plan, rank))
        worst = max(worst, _difference(runs[name](), expected, plan, rank))
    plan = plan_step(row, world_size, "head_tail", "a2a")
    ring = Ring(plan, transport)
    runs["ring"] = partial(_run, _on_rows(ring), _local(tensors, plan, rank))
    worst = max(worst, _difference(runs["ring"](), expected, plan, rank))
    try:
        ulysses = Ulysses(row, transport, *heads)
    except ValueError as reason:
        not_run["ulysses"] = str(reason)
    else:
        plan = plan_step(row, world_size, "contiguous", "a2a")
        runs["ulysses"] = partial(_run, _on_rows(ulysses), _local(tensors, plan, rank))
        worst = max(worst, _difference(runs["ulysses"](), expected, plan, rank))
    runs["document_loop"] = partial(_run, document_loop(row), tensors)
    alone = {"document_loop": 1}
    times = _time(runs, alone, options["rounds"], rank)
    dense_times = {}
    if options["dense"]:
        runs = {"balanced_a2a": runs["balanced_a2a"]}
        runs["dense_mask_two_threads"] = partial(_run, dense_mask(row), tensors)
        if rank == 0:
            worst = max(worst, _largest(runs["dense_mask_two_threads"](), expected))
        dense_times = _time(runs, {"dense_mask_two_threads": 2}, DENSE_ROUNDS, rank)
    exposed = {}
    if options["delay_ms"] is not None:
        exposed = _exposed(tensors, row, transport, options["delay_ms"], options["rounds"])
    return {
        "times": times,
        "dense_times": dense_times,
        "largest_difference": worst,
        "not_run": not_run,
        "exposed_ms": exposed,
    }


def _whole(row: PackedRow, heads: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Query, key, value and output gradient `[1, S, H, D]`, the same on every rank."""
    torch.manual_seed(0)
    return tuple(
        torch.randn(1, row.length, n, HEAD_DIM) for n in (heads[0], heads[1], heads[1], heads[0])
    )


def _local(tensors: tuple[torch.Tensor, ...], plan: Plan, rank: int) -> tuple[torch.Tensor, ...]:
    rows = torch.from_numpy(plan.shards.rows(rank)).clamp(max=plan.row.length - 1)
    return tuple(t[:, rows] for t in tensors)


def _run(
    attend: Callable[[Tensors], torch.Tensor], tensors: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """Return output and gradients `[1, n, H, D]` of one forward and backward."""
    *rest, grad = tensors
    leaves = [t.detach().requires_grad_() for t in rest]
    q, k, v = (t.transpose(1, 2) for t in leaves)
    out = attend((q, k, v)).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _spread(attend: Callable[..., torch.Tensor]) -> Callable[[Tensors], torch.Tensor]:
    return lambda qkv: attend(*qkv)


def _on_rows(attend: Callable[..., torch.Tensor]) -> Callable[[Tensors], torch.Tensor]:
    """Serve `[1, H, n, D]` with attention of `[n, H, D]`."""
    return lambda qkv: attend(*(t.squeeze(0).transpose(0, 1) for t in qkv)).transpose(0, 1)[None]


def _difference(
    found: list[torch.Tensor], expected: list[torch.Tensor], plan: Plan, rank: int
) -> float:
    rows = torch.from_numpy(plan.shards.rows(rank))
    real = rows < plan.row.length
    return _largest([t[:, real] for t in found], [t[:, rows[real]] for t in expected])


def _largest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference relative to the largest number; raise where it is wrong."""
    worst = max(
        ((ours - theirs).abs().max() / theirs.abs().max()).item()
        for ours, theirs in zip(found, expected, strict=True)
    )
    if not worst <= TOLERANCE:
        raise AssertionError(f"contenders differ by {worst:.1e} relative; allowed {TOLERANCE}")
    return worst


def _time(runs: dict[str, Run], alone: dict[str, int], rounds: int, rank: int) -> Times:
    """Time each run from a barrier on; those `alone` run on rank 0, on so many threads.

    The order shifts from round to round, so that nobody always runs first.
    """
    times: Times = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            torch.set_num_threads(alone.get(name, 1))
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            if rank == 0 or name not in alone:
                runs[name]()
            ended = time.perf_counter(), time.process_time()
            wall, processor = ((b - a) * 1e3 for a, b in zip(began, ended, strict=True))
            times[name].append((wall, processor))
    torch.set_num_threads(1)
    return times


def _exposed(
    tensors: tuple[torch.Tensor, ...],
    row: PackedRow,
    transport: Transport,
    delay_ms: float,
    rounds: int,
) -> dict[str, float]:
    """Median milliseconds that a rank waits for arrivals over a link slowed by `delay_ms`."""
    plan = plan_step(row, transport.world_size, "balanced", "a2a")
    local = _local(tensors, plan, transport.rank)
    waits: dict[str, list[float]] = {"hidden": [], "waited": []}
    for _ in range(rounds):
        for name, overlap in (("hidden", True), ("waited", False)):
            link = Delayed(transport, delay_ms / 1e3)
            step = CpStep.make(plan, link, attn_backend="flash", overlap=overlap)
            dist.barrier()
            _run(_spread(partial(cp_blockdiag_sdpa, enable_gqa=True, step=step)), local)
            waits[name].append(link.exposed_s * 1e3)
    return {name: statistics.median(each) for name, each in waits.items()}
