"""Let those who watch a model hear of every attention call that it makes under a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Tell = Callable[[str], None]

_OF_THREAD: ContextVar[Tell | None] = ContextVar("longpack_attention_observer", default=None)
_OF_PROCESS: list[Tell] = []


@contextmanager
def observe_attention(tell: Tell) -> Iterator[None]:
    """Call `tell(kernel)` before every attention call of this rank in the block.

    A rank is this thread, and also autograd's own threads where no other rank of this process
    observes: a device's backward runs there. Recomputes of a checkpoint are calls too (see
    `longpack.recompute_replay.is_recomputing`). Calls inside a compiled graph are told once, while
    it is traced.
    """
    token = _OF_THREAD.set(tell)
    _OF_PROCESS.append(tell)
    try:
        yield
    finally:
        _OF_PROCESS.remove(tell)
        _OF_THREAD.reset(token)


def tell_observer(kernel: str) -> None:
    """Tell whoever observes this rank which kernel is about to run."""
    tell = _OF_THREAD.get()
    if tell is None and len(_OF_PROCESS) == 1:
        (tell,) = _OF_PROCESS
    if tell is not None:
        tell(kernel)
