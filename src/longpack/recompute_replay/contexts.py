"""The contexts that checkpoint enters. They keep no state of an entry, so they can be entered
again, inside themselves and on any thread; nothing here may be a generator-based context."""

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from torch.utils.checkpoint import _StopRecomputationError

from longpack.errors import LongpackWarning, ReplayError
from longpack.recompute_replay.miss import early_stopped, place
from longpack.recompute_replay.outside import RandomState, run_outside
from longpack.recompute_replay.recorder import Position, RecomputeReplayRecorder

CheckpointContextFn = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]

# A recorder and its mode, and what is put back on leaving: the position of the replay that this
# one interrupts in its thread, and the random streams.
Bound = tuple[RecomputeReplayRecorder | None, str | None, Position | None, RandomState | None]


class _Binding(threading.local):
    """Thread-local `(recorder, mode)` binding; `__init__` runs once per thread."""

    def __init__(self) -> None:
        # Innermost last. One attribute, as every access to a thread-local takes 0.04 to 0.1 us.
        self.stack: list[Bound] = [(None, None, None, None)]

    @property
    def recorder(self) -> RecomputeReplayRecorder | None:
        return self.stack[-1][0]

    @recorder.setter
    def recorder(self, recorder: RecomputeReplayRecorder | None) -> None:
        self.stack[-1] = (recorder, *self.stack[-1][1:])

    @property
    def mode(self) -> str | None:
        return self.stack[-1][1]

    @mode.setter
    def mode(self, mode: str | None) -> None:
        self.stack[-1] = (self.stack[-1][0], mode, *self.stack[-1][2:])


class Record:
    """Binds a recorder to write to while it is entered; None switches the channel off."""

    __slots__ = ("_binding", "_recorder")

    def __init__(self, binding: _Binding, recorder: RecomputeReplayRecorder | None) -> None:
        self._binding, self._recorder = binding, recorder

    def __enter__(self) -> None:
        recorder = self._recorder
        self._binding.stack.append((recorder, "record", None, None))
        if recorder is not None:
            recorder.forwards_open += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        recorder = self._recorder
        self._binding.stack.pop()
        if recorder is not None:
            recorder.forwards_open -= 1
            if recorder._records:
                recorder.count_bytes()


class Replay:
    """Binds a recorder to read from while it is entered, from its first record.

    Every entry has its own position. With `keeps_random` it leaves the random streams as it found
    them: a replayed decision sets them to where they stood in the forward. The checkpoint puts
    its caller's streams back, but not with `preserve_rng_state=False`: the numbers of an earlier
    forward would be drawn again in the next step.
    """

    __slots__ = ("_binding", "_keeps_random", "_recorder")

    def __init__(
        self, binding: _Binding, recorder: RecomputeReplayRecorder, keeps_random: bool
    ) -> None:
        self._binding, self._recorder, self._keeps_random = binding, recorder, keeps_random

    def __enter__(self) -> None:
        recorder = self._recorder
        random = RandomState() if self._keeps_random and not recorder.is_empty else None
        self._binding.stack.append((recorder, "replay", recorder.begin(), random))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        recorder = self._recorder
        _, _, position, random = self._binding.stack.pop()
        if position is not None:
            recorder.resume(position)
        if random is not None:
            random.restore()
        if kind is _StopRecomputationError and recorder.has_collective:
            where = place(recorder.name, "", recorder.labels)
            warnings.warn(early_stopped(where), LongpackWarning, stacklevel=2)


class Then:
    """Enters `context` and, when its block ends without an exception, calls `after` outside."""

    __slots__ = ("_after", "_context")

    def __init__(self, context: AbstractContextManager, after: Callable[[], None]) -> None:
        self._context, self._after = context, after

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        swallowed = self._context.__exit__(kind, error, trace)
        if kind is None:
            run_outside(self._after)
        return swallowed


class Nested:
    """Enters several contexts, the first outermost."""

    __slots__ = ("_contexts",)

    def __init__(self, *contexts: AbstractContextManager) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for context in self._contexts:
                _refuse_used_generator(context)
                entered.enter_context(context)
            entered.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        leaving = ExitStack()
        for context in self._contexts:
            leaving.push(context)
        return leaving.__exit__(kind, error, trace)


def _refuse_used_generator(context: AbstractContextManager) -> None:
    # contextlib deletes the arguments of a generator-based context when it is entered.
    if hasattr(context, "gen") and not hasattr(context, "args"):
        raise ReplayError(
            f"the context of {context.gen.__name__!r} was entered a second time, as a frame is "  # pyright: ignore
            "recomputed once a backward, and a @contextmanager context can be entered once; "
            "return an instance of a class with __enter__ and __exit__ from context_fn"
        )
