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
from longpack.recompute_replay.recorder import RecomputeReplayRecorder

CheckpointContextFn = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


class _Binding(threading.local):
    """Thread-local `(recorder, mode)` binding; `__init__` runs once per thread."""

    def __init__(self) -> None:
        self.recorder: RecomputeReplayRecorder | None = None
        self.mode: str | None = None
        self._outer: list[tuple[RecomputeReplayRecorder | None, str | None, Any, Any]] = []

    def enter(
        self,
        recorder: RecomputeReplayRecorder | None,
        mode: str,
        random: RandomState | None = None,
    ) -> None:
        """Bind `recorder` until `leave`, which restores `random`; a replay starts at record 0."""
        resume = None
        if recorder is not None and mode == "record":
            recorder.open()
        elif recorder is not None:
            resume = recorder._position if self._outer and self._replays(recorder) else None
            recorder.rewind()
        self._outer.append((self.recorder, self.mode, resume, random))
        self.recorder, self.mode = recorder, mode

    def leave(self) -> None:
        """Bind again what was bound before the last `enter`."""
        recorder, mode = self.recorder, self.mode
        self.recorder, self.mode, resume, random = self._outer.pop()
        if recorder is not None and mode == "record":
            recorder.close()
        elif recorder is not None and resume is not None:
            recorder._position = resume
        if random is not None:
            random.restore()

    def _replays(self, recorder: RecomputeReplayRecorder) -> bool:
        bound = [(self.recorder, self.mode), *((outer[0], outer[1]) for outer in self._outer)]
        return any(r is recorder and m == "replay" for r, m in bound)


class Scope:
    """Binds a recorder in one mode while it is entered."""

    __slots__ = ("_binding", "_mode", "_recorder")

    def __init__(
        self, binding: _Binding, recorder: RecomputeReplayRecorder | None, mode: str
    ) -> None:
        self._binding, self._recorder, self._mode = binding, recorder, mode

    def __enter__(self) -> None:
        self._binding.enter(self._recorder, self._mode)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._binding.leave()


class Recompute(Scope):
    """Replays, and leaves the random streams as it found them.

    A replayed decision sets them to where they stood in the forward. The checkpoint puts its
    caller's streams back, but not with `preserve_rng_state=False`: the numbers of an earlier
    forward would be drawn again in the next step.
    """

    __slots__ = ("_preserve_random",)

    def __init__(
        self, binding: _Binding, recorder: RecomputeReplayRecorder, preserve_random: bool
    ) -> None:
        super().__init__(binding, recorder, "replay")
        self._preserve_random = preserve_random

    def __enter__(self) -> None:
        recorder = self._recorder
        sets_random = self._preserve_random and recorder is not None and not recorder.is_empty
        self._binding.enter(recorder, self._mode, RandomState.capture() if sets_random else None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._binding.leave()
        recorder = self._recorder
        if kind is _StopRecomputationError and recorder is not None and recorder.has_collective:
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
