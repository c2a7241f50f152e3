"""One context_fn out of many: channels, carried state, selective checkpointing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from longpack.recompute_replay.carry import Carry
from longpack.recompute_replay.channel import RecomputeReplay
from longpack.recompute_replay.contexts import CheckpointContextFn, Nested

Part = RecomputeReplay | Carry | CheckpointContextFn


def compose(*parts: Part) -> CheckpointContextFn:
    """Return one `context_fn` for `torch.utils.checkpoint` out of several parts, first outermost.

    Arguments:
        parts: channels, carried state (`Carry`), and other factories of (forward, recompute)
            contexts, such as `partial(create_selective_checkpoint_contexts, policy)`.
    """
    context_fns = tuple(_context_fn(part) for part in parts)
    return context_fns[0] if len(context_fns) == 1 else partial(_open, context_fns)


def _open(
    context_fns: tuple[CheckpointContextFn, ...],
) -> tuple[AbstractContextManager, AbstractContextManager]:
    pairs = [context_fn() for context_fn in context_fns]
    return Nested(*(pair[0] for pair in pairs)), Nested(*(pair[1] for pair in pairs))


def _context_fn(part: Part) -> CheckpointContextFn:
    if isinstance(part, RecomputeReplay):
        return part.checkpoint_context_fn(None)
    if isinstance(part, Carry):
        return partial(_carry, part.capture)
    return part


def _carry(
    capture: Callable[[], AbstractContextManager],
) -> tuple[AbstractContextManager, AbstractContextManager]:
    return nullcontext(), capture()
