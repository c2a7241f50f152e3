"""Measure the rates of the cost model on this machine, and check a prediction on two ranks."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from longpack.bench.lengths import pack_row
from longpack.bench.timing import machine, medians, time_in_turn
from longpack.collectives import Transport, as_transport
from longpack.kernels import KernelCall, Segments, attend, choose_kernel
from longpack.packing import PackedRow
from longpack.plan import CostModel, LayerShape, Machine, Plan, plan_step
from longpack.testing.ranks import World

SMALL = LayerShape(num_layers=1, num_heads=9, num_kv_heads=3, head_dim=64, element_bytes=4)
SHORT_TOKENS = 16  # documents of the row that measures the cost of a segment
MESSAGE_BYTES = (64, 1 << 24)  # an exchange of nearly nothing, and one that fills the link


def calibrate(
    shape: LayerShape = SMALL, tokens: int = 4096, rounds: int = 5, world_size: int = 2
) -> dict[str, Any]:
    """Measure the rates of a `Machine`: attention, a segment, matrix products, a link.

    Attention is timed forward and backward, in fp32 on the CPU and bf16 on a GPU, on one
    document and on documents of 16 tokens; the second beyond the first's rate is the cost of
    segments. The link is that of `world_size` gloo ranks on this machine, so near and far are
    the same: give the far rate of a cluster yourself.

    Args:
        shape: heads and head size to attend with.
        tokens: rows of the timed attention.
        rounds: timed rounds; figures are medians.
        world_size: ranks of the timed exchange.
    """
    long = PackedRow.from_lengths([tokens])
    short = PackedRow.from_lengths([SHORT_TOKENS] * (tokens // SHORT_TOKENS))
    size = 1024
    times = time_in_turn(
        {
            "long": _attention(plan_step(long, 1), 0, shape),
            "short": _attention(plan_step(short, 1), 0, shape),
            "linear": _matmul(size),
        },
        rounds,
    )
    seconds = {name: ms / 1e3 for name, ms in medians(times).items()}
    rate = shape.pair_flops * long.area / seconds["long"]
    segments_s = seconds["short"] - shape.pair_flops * short.area / rate
    message_s, bytes_per_s = _on_ranks(world_size, _link, rounds)[0]
    measured = Machine(
        attention_flops_per_s=rate,
        segment_s=max(0.0, segments_s / (2 * len(short))),  # forward and backward
        linear_flops_per_s=2 * size**3 / seconds["linear"],
        near_bytes_per_s=bytes_per_s,
        far_bytes_per_s=bytes_per_s,
        message_s=message_s,
        ranks_per_node=world_size,
    )
    return {"machine": machine(), "seconds": seconds, "rates": asdict(measured)}


def run_straggler_bench(
    tokens: int = 8192,
    world_size: int = 2,
    rounds: int = 5,
    seed: int = 0,
    shape: LayerShape = SMALL,
    rates: Machine | None = None,
) -> dict[str, Any]:
    """Time the slowest rank's attention under `contiguous` and `balanced`, beside the prediction.

    Each gloo rank, on a thread of its own, runs its part of a row with the lengths of SQLite's
    documentation, forward and backward, without the exchange; the layouts take turns.

    Args:
        tokens: rows of the packed row.
        world_size: ranks.
        rounds: timed rounds, of which the least disturbed counts.
        seed: picks the documents.
        shape: heads and head size.
        rates: of this machine; measured by `calibrate` by default.
    """
    row = pack_row("sqlite3_doc", tokens, seed)
    model = CostModel(shape, rates or Machine(**calibrate(shape)["rates"]))
    plans = {name: plan_step(row, world_size, name, "a2a") for name in ("contiguous", "balanced")}
    per_rank = _on_ranks(world_size, _time_plans, plans, shape, rounds)
    slowest = {name: max(times[name] for times in per_rank) for name in plans}
    predicted = {
        name: 1e3 * float(model.predict(p.shards, p.pieces, p.kv_exchange).attention_s.max())
        for name, p in plans.items()
    }
    return {
        "machine": machine(),
        "row": {"tokens": row.length, "lengths": list(row.lengths)},
        "imbalance": {name: plan.imbalance for name, plan in plans.items()},
        "slowest_rank_ms": slowest,
        "predicted_ms": predicted,
        "measured_ratio": slowest["contiguous"] / slowest["balanced"],
        "predicted_ratio": predicted["contiguous"] / predicted["balanced"],
    }


def _attention(plan: Plan, rank: int, shape: LayerShape) -> Callable[[], Any]:
    """Return one forward and backward of a rank's attention; K/V are there already."""
    segments = Segments(plan.segments(rank), plan.local_length, int(plan.pieces.needed[rank]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    query, key, value = (
        torch.randn(rows, n, dim, device=device, dtype=dtype, requires_grad=True)
        for rows, n in (
            (segments.num_queries, heads),
            (segments.num_keys, kv_heads),
            (segments.num_keys, kv_heads),
        )
    )
    kernel = choose_kernel("flash", KernelCall(device, dtype, heads, kv_heads, dim, dim)).name
    grad = torch.randn_like(query)

    def run() -> None:
        out = attend(kernel, query, key, value, segments, dim**-0.5)
        torch.autograd.grad(out, (query, key, value), grad)
        _synchronise()

    return run


def _matmul(size: int) -> Callable[[], Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def run() -> None:
        torch.mm(a, b)
        _synchronise()

    return run


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _on_ranks(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    world = World.start(world_size)
    try:
        return world.run(body, *args, timeout_s=600)
    finally:
        world.kill()


def _time_plans(
    rank: int, world_size: int, plans: dict[str, Plan], shape: LayerShape, rounds: int
) -> dict[str, float]:
    """Milliseconds of one rank's attention under each plan, of the least disturbed round."""
    contenders = {name: _attention(plan, rank, shape) for name, plan in plans.items()}
    times = time_in_turn(contenders, rounds)
    return {name: min(t) for name, t in times.items()}


def _link(rank: int, world_size: int, rounds: int) -> tuple[float, float]:
    """Return the seconds of an exchange of nearly nothing, and bytes a second of a full one."""
    import torch.distributed as dist

    transport = as_transport(dist.group.WORLD)
    small, large = (_exchange_s(transport, nbytes, rounds) for nbytes in MESSAGE_BYTES)
    moved = MESSAGE_BYTES[1] * (world_size - 1)
    return small, moved / max(large - small, 1e-9)


def _exchange_s(transport: Transport, nbytes: int, rounds: int) -> float:
    """Return the median seconds of an all-to-all of `nbytes` from each rank to each other."""
    counts = [0 if r == transport.rank else nbytes for r in range(transport.world_size)]
    rows = torch.zeros(sum(counts), dtype=torch.uint8)
    exchange = partial(transport.all_to_all, rows, counts, counts)
    return medians(time_in_turn({"exchange": exchange}, rounds))["exchange"] / 1e3
