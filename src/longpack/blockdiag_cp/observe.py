"""Let those who watch a model hear of every attention call that it makes under a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OBSERVER: ContextVar[Callable[[str], None] | None] = ContextVar(
    "longpack_attention_observer", default=None
)


@contextmanager
def observe_attention(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell(kernel)` before every attention call of this thread in the block.

    Recomputes of a checkpoint are calls too (see `longpack.recompute_replay.is_recomputing`).
    Calls inside a compiled graph are told once, while it is traced.
    """
    token = _OBSERVER.set(tell)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def tell_observer(kernel: str) -> None:
    """Tell whoever observes this thread which kernel is about to run."""
    tell = _OBSERVER.get()
    if tell is not None:
        tell(kernel)
