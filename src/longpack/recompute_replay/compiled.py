"""Decisions inside `torch.compile`: one opaque operator that asks the channel when it runs.

Dynamo would write a choice made in Python into the graph, and a replayed graph would save other
tensors than a recorded one. An operator that the compiler cannot look into is the same node in
both, so that whole-block compile with `fullgraph=True` works.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from longpack.recompute_replay.channel import RecomputeReplay
from longpack.recompute_replay.codecs import Codec
from longpack.recompute_replay.values import map_tensors

_NAMESPACE = "longpack_replay"

PolicyFn = Callable[..., CheckpointPolicy]


def compiled_decision(
    channel: RecomputeReplay[Any],
    fn: Callable[..., Any],
    *,
    name: str,
    fake: Callable[..., Any] | None = None,
    collective: bool = False,
    codec: Codec | None = None,
) -> Callable[..., Any]:
    """Return `fn` as an operator that records in forward and replays in the recompute.

    Make it once, at import, and call it inside the compiled block; the checkpoint is around the
    compiled block. No gradient goes through it.

    Arguments:
        channel: the channel that is consulted when the operator runs.
        fn: makes the decision. Every argument and result is annotated as for
            `torch.library.custom_op`: tensors and numbers in, one tensor or a tuple of them out.
        name: names the operator, unique in the process, and the site.
        fake: shapes of the results from fake arguments; default `fn` itself.
        collective, codec: as for `RecomputeReplay.decide`.
    """

    @wraps(fn)  # the schema is read off the annotations of fn
    def decide(*args: Any) -> Any:
        decision = channel.decide(lambda: fn(*args), site=name, collective=collective, codec=codec)
        # The compiler may reuse the memory of a result, and the record must stay as it is.
        return map_tensors(torch.clone, decision)

    op = torch.library.custom_op(f"{_NAMESPACE}::{name}", decide, mutates_args=())
    op.register_fake(fake or fn)

    @wraps(fn)
    def call(*args: Any) -> Any:
        return op(*(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args))

    return call


def save_decisions(policy: PolicyFn | None = None) -> PolicyFn:
    """Return a selective-checkpointing policy that saves compiled decisions.

    For a checkpoint inside the compiled region, where no channel can be bound: torch keeps the
    results of the operators, and they run once.

    Arguments:
        policy: decides for every other operator; default recompute.
    """

    def with_decisions(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if getattr(op, "namespace", None) == _NAMESPACE:
            return CheckpointPolicy.MUST_SAVE
        if policy is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return policy(ctx, op, *args, **kwargs)

    return with_decisions
