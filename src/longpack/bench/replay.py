"""What recording and replaying costs: time on top of plain checkpointing, and bytes kept."""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from longpack.bench.timing import machine, on_threads, time_in_turn
from longpack.collectives import as_transport
from longpack.integrations.expert_dispatch import DispatchLayout, ExpertDispatch
from longpack.recompute_replay import BitCodec, Codec, IdCodec, RecomputeReplay, compose
from longpack.testing import World

_CALLS = 100  # checkpointed calls a timing
_DECISIONS = 20  # decisions a call, where a decision is timed


def run_replay_bench(rounds: int = 30) -> dict[str, Any]:
    """Measure a checkpointed call and a decision on top of plain checkpointing.

    Times are forward plus backward in microseconds, medians of differences within a round, and
    the same as a share of an empty checkpointed block of the same round. Bytes are what
    `RecomputeReplay.usage` counts for one record.

    Arguments:
        rounds: how often every contender runs, in turn.
    """
    with on_threads(1):
        times = time_in_turn(_contenders(), rounds, warmup=3)
    return {
        "machine": machine(),
        "rounds": rounds,
        "empty_checkpointed_block_us": _per_call(times["plain"]),
        "call": _extra(times, "channel", "plain", 1),
        "decision": _extra(times, "decisions", "thunks", _DECISIONS),
        "decision_preserve_random_false": _extra(times, "draw_free", "thunks", _DECISIONS),
        "record_bytes": record_bytes(),
        "expert_dispatch_on_2_gloo_ranks": dispatch_times(rounds),
    }


def dispatch_times(rounds: int) -> dict[str, float]:
    """Return milliseconds of a checkpointed dispatch and combine on 2 gloo ranks, by median.

    2,048 tokens of 64 numbers a rank, top-2 of 16 experts. "decided_twice" makes the layout again
    in the recompute, with its exchange of counts and its wait for them.
    """
    world = World.start(2)
    try:
        times = world.run(_time_dispatch, rounds, timeout_s=300)[0]
    finally:
        world.kill()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return medians | {"saved_ms": medians["decided_twice"] - medians["replayed"]}


def record_bytes() -> dict[str, dict[str, int]]:
    """Return the bytes of common records with and without their codec."""
    ids = torch.arange(8).repeat(8192, 1)
    mask = torch.zeros(1, 4, 4096, 64, dtype=torch.bool)
    return {
        "top 8 of 64 experts, 8,192 tokens": _with_and_without(ids, IdCodec(64)),
        "top 8 of 384 experts, 8,192 tokens": _with_and_without(ids, IdCodec(384)),
        "block mask [1, 4, 4096, 64]": _with_and_without(mask, BitCodec()),
    }


def _time_dispatch(rank: int, world_size: int, rounds: int) -> dict[str, list[float]]:
    channel: RecomputeReplay[DispatchLayout] = RecomputeReplay("dispatch", preserve_random=False)
    dispatch = ExpertDispatch(channel, as_transport(dist.group.WORLD), num_experts=16)
    source = torch.Generator().manual_seed(rank)
    x = torch.randn(2048, 64, generator=source).requires_grad_()
    ids = torch.rand(2048, 16, generator=source).topk(2).indices
    weights = torch.rand(2048, 2, generator=source)

    def block(x: torch.Tensor, replays: bool) -> torch.Tensor:
        if replays:
            layout = dispatch.layout(ids)
        else:
            with channel.scope(None, "replay"):
                layout = dispatch.layout(ids)
        return dispatch.combine(dispatch.dispatch(x, layout).sin(), weights, layout)

    def step(replays: bool) -> None:
        out = checkpoint(
            block, x, replays, use_reentrant=False, context_fn=compose(channel), early_stop=False
        )
        out.sum().backward()

    contenders = {"replayed": lambda: step(True), "decided_twice": lambda: step(False)}
    return time_in_turn(contenders, rounds, warmup=3)


def _contenders() -> Mapping[str, Callable[[], None]]:
    ids = torch.arange(4)
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("bench")
    draw_free: RecomputeReplay[torch.Tensor] = RecomputeReplay("bench", preserve_random=False)

    def thunk() -> torch.Tensor:
        return ids

    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def deciding(decide: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def body(x: torch.Tensor) -> torch.Tensor:
            for _ in range(_DECISIONS):
                decide(thunk)
            return x.sin()

        return body

    record = compose(channel)
    return {
        "plain": partial(_run, block),
        "channel": partial(_run, block, context_fn=record),
        "thunks": partial(_run, deciding(lambda fn: fn()), context_fn=record),
        "decisions": partial(_run, deciding(channel.decide), context_fn=record),
        "draw_free": partial(_run, deciding(draw_free.decide), context_fn=compose(draw_free)),
    }


def _run(body: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> None:
    x = torch.ones(4, requires_grad=True)
    for _ in range(_CALLS):
        checkpoint(body, x, use_reentrant=False, **options).sum().backward()


def _per_call(times_ms: list[float]) -> float:
    return statistics.median(times_ms) * 1e3 / _CALLS


def _extra(times: Mapping[str, list[float]], name: str, base: str, each: int) -> dict[str, float]:
    """Return what `name` takes more than `base`, per call and by `each`."""
    rounds = list(zip(times[name], times[base], times["plain"], strict=True))
    return {
        "extra_us": statistics.median(a - b for a, b, _ in rounds) * 1e3 / _CALLS / each,
        "share_of_empty_block": statistics.median((a - b) / plain for a, b, plain in rounds) / each,
    }


def _with_and_without(value: torch.Tensor, codec: Codec) -> dict[str, int]:
    return {"plain": _bytes(value, None), "codec": _bytes(value, codec)}


def _bytes(value: torch.Tensor, codec: Codec | None) -> int:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay(
        "bench", codec=codec, preserve_random=False
    )
    forward, _ = channel.checkpoint_context_fn(None)()
    with forward:
        channel.decide(lambda: value)
    return channel.usage().live_bytes
