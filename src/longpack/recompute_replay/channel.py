"""A channel: one kind of decision, recorded in forward and replayed in recompute."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Generic

import torch
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling

from longpack.errors import ReplayError, UnsupportedError
from longpack.recompute_replay.accounting import Ledger, Usage
from longpack.recompute_replay.codecs import Codec
from longpack.recompute_replay.contexts import (
    CheckpointContextFn,
    Nested,
    Record,
    Replay,
    Then,
    _Binding,
)
from longpack.recompute_replay.miss import (
    AgreeOnMiss,
    MissPolicy,
    current_labels,
    out_of_order,
    place,
    too_few,
    unbound,
)
from longpack.recompute_replay.outside import RandomState, is_outside, run_outside, run_uncounted
from longpack.recompute_replay.phase import is_recomputing
from longpack.recompute_replay.recorder import RecomputeReplayRecorder, T
from longpack.recompute_replay.values import detached, map_tensors
from longpack.recompute_replay.verify import Drift, Margin, VerifyReport, measure

_MODES = ("record", "replay")


class RecomputeReplay(Generic[T]):
    """One named record/replay channel with its own thread-local binding.

    Arguments:
        name: channel name used in messages.
        on_miss: what a recompute does when its forward recorded too few decisions: "raise",
            "recompute" (decide again) or `AgreeOnMiss`. Default: raise for decisions that contain
            a collective, since a rank that decides again alone pairs its collective with another
            one of its peers; recompute for the others.
        codec: how decisions are stored; default as they are.
        preserve_random: keep the random streams after a decision, so that a replay leaves them
            where the forward did. False saves 5 KiB and 1.8 us of 4.2 a decision, and is needed
            under CUDA graph capture; then no decision may draw random numbers.
    """

    def __init__(
        self,
        name: str,
        *,
        on_miss: MissPolicy | None = None,
        codec: Codec | None = None,
        preserve_random: bool = True,
    ) -> None:
        self.name = name
        self.on_miss = on_miss
        self.codec = codec
        self.preserve_random = preserve_random
        self._binding = _Binding()
        self._ledger = Ledger()
        self._verifying: tuple[VerifyReport, Margin | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "RecomputeReplay[T]":
        """Return the channel itself: copies of a model decide on the same channel."""
        return self

    def current(self) -> tuple[RecomputeReplayRecorder[T], str] | None:
        """Return the active `(recorder, mode)`, or `None` outside a scope."""
        recorder, mode, _, _ = self._binding.stack[-1]
        if recorder is None or mode is None or is_outside():
            return None
        return recorder, mode

    def scope(
        self, recorder: RecomputeReplayRecorder[T] | None, mode: str
    ) -> AbstractContextManager[None]:
        """Bind `recorder` in `mode` (`"record"` or `"replay"`) for the enclosed region.

        `None` as recorder switches the channel off inside. The context can be entered again; a
        replay then starts again at the first record.

        Raises:
            UnsupportedError: a ValueError, for any other mode.
        """
        if mode not in _MODES:
            raise UnsupportedError(
                f"channel {self.name!r}: mode={mode!r} is none of {', '.join(_MODES)}"
            )
        if recorder is None or mode == "record":
            return Record(self._binding, recorder)
        return Replay(self._binding, recorder, keeps_random=False)

    def checkpoint_context_fn(
        self,
        context_fn: CheckpointContextFn | None,
        on_record_exit: Callable[[RecomputeReplayRecorder[T]], None] | None = None,
    ) -> CheckpointContextFn:
        """Wrap a checkpoint `context_fn` so that this channel records, and replays in recompute.

        Arguments:
            context_fn: existing factory of the (forward, recompute) contexts, such as that of
                selective checkpointing or of another channel; None for no other contexts.
            on_record_exit: called with the recorder after the forward contexts have exited, with
                no gradient and no dispatch mode; not called when the forward raised.
        """
        # Dynamo takes a plain function or a partial here, and nothing else.
        return partial(self._contexts, context_fn, on_record_exit)

    def decide(
        self,
        fn: Callable[[], T],
        *,
        site: str = "",
        collective: bool = False,
        inputs: Any = None,
        codec: Codec | None = None,
    ) -> T:
        """Return `fn()` in forward and what it returned there in the recompute.

        `fn` runs with no gradient, unseen by selective checkpointing and by every channel, and
        its result is detached. The random streams after it are the same whether it ran or not.
        Outside every checkpoint `fn` runs the same way and nothing is recorded.

        Arguments:
            fn: makes the decision: tensors, numbers or opaque handles, nested in lists, tuples,
                dicts and dataclasses.
            site: names the decision; a replay checks that it matches.
            collective: the decision contains a collective, so that all ranks must make it or none.
            inputs: the tensors that it depends on; verify mode compares them.
            codec: how this decision is stored; default the codec of the channel.

        Raises:
            ReplayError: when the log has no such decision (see `on_miss`), holds another site
                there, or holds one that was changed in place; and in a recompute of a checkpoint
                that this channel is not bound to.
        """
        if is_dynamo_compiling():
            return _decide_eagerly(
                self, fn, site=site, collective=collective, inputs=inputs, codec=codec
            )
        recorder, mode, _, _ = self._binding.stack[-1]
        if recorder is None or is_outside():
            self._refuse_unbound(site)
            return detached(run_outside(fn))
        if mode == "replay":
            return self._replay(recorder, fn, site, collective, inputs)
        value = detached(run_outside(fn))
        random = RandomState() if self.preserve_random else None
        copied = None if self._verifying is None else map_tensors(_copy, inputs)
        recorder.append(value, site, codec or self.codec, random, copied)
        recorder.has_collective |= collective
        return value

    @contextmanager
    def verify(self, margin: Margin | None = None) -> Iterator[VerifyReport]:
        """Check every decision replayed inside, on any thread, against one that is made again.

        The recorded decision is still the one that is used. Have both forward and backward
        inside, so that inputs can be compared; they are copied. A decision that contains a
        collective runs its collective again: verify on every rank or on none.

        Arguments:
            margin: from (inputs, recorded, fresh), how far from a tie a changed decision was;
                `score_margin` for indices into scores.
        """
        outer, report = self._verifying, VerifyReport()
        self._verifying = (report, margin)
        try:
            yield report
        finally:
            self._verifying = outer

    def usage(self) -> Usage:
        """Return the bytes that the records of this channel hold now and held at most."""
        return self._ledger.usage()

    def _contexts(
        self,
        context_fn: CheckpointContextFn | None,
        on_record_exit: Callable[[RecomputeReplayRecorder[T]], None] | None,
    ) -> tuple[AbstractContextManager, AbstractContextManager]:
        binding = self._binding
        recorder, replays = self._log_of_call()
        forward = Replay(binding, recorder, False) if replays else Record(binding, recorder)
        recompute = Replay(binding, recorder, self.preserve_random)
        if context_fn is not None:
            inner_forward, inner_recompute = context_fn()
            forward = Nested(forward, inner_forward)
            recompute = Nested(recompute, inner_recompute)
        if on_record_exit is not None and not replays:
            forward = Then(forward, partial(_finish, recorder, on_record_exit))
        return forward, recompute

    def _log_of_call(self) -> tuple[RecomputeReplayRecorder[T], bool]:
        """Return the log of a checkpointed call that starts here, and whether its forward replays.

        Inside another recorded call it is a new child of that call's log. Inside a replayed one
        this forward is itself a recompute, and replays the child that the first forward wrote.
        """
        outer, mode = self.current() or (None, None)
        if outer is not None and mode == "replay":
            child = outer.take_child()
            if child is not None:
                return child, True
            self._count_miss(outer, "a checkpointed call", collective=False)
        recorder: RecomputeReplayRecorder[T] = RecomputeReplayRecorder()
        recorder.name, recorder.labels = self.name, current_labels()
        recorder.ledger = self._ledger
        if outer is not None and mode == "record":
            outer.children.append(recorder)
        return recorder, False

    def _replay(
        self,
        recorder: RecomputeReplayRecorder[T],
        fn: Callable[[], T],
        site: str,
        collective: bool,
        inputs: Any,
    ) -> T:
        position = recorder.position
        at = position.record
        missing = at >= len(recorder._records)
        if isinstance(self.on_miss, AgreeOnMiss) and self._any_rank_misses(self.on_miss, missing):
            position.record += not missing
            recorder.replay_misses += missing
            return detached(run_outside(fn))
        if missing:
            self._count_miss(recorder, site, collective)
            return detached(run_outside(fn))
        value, note = recorder.read(at)
        if note is not None and note.site != site:
            where = place(self.name, site, recorder.labels)
            raise ReplayError(out_of_order(where, at, site, recorder.sites))
        position.record = at + 1
        if note is not None:
            if self._verifying is not None:
                self._examine(recorder, at, value, note.inputs, fn, site, inputs)
            if note.random is not None:
                note.random.restore()
        return value

    def _any_rank_misses(self, agree: AgreeOnMiss, missing: bool) -> bool:
        return run_outside(lambda: agree.any_rank(missing))  # the forward had no vote to count

    def _count_miss(
        self, recorder: RecomputeReplayRecorder[T], site: str, collective: bool
    ) -> None:
        """Count a decision that was not recorded; raise where the policy says so.

        A log whose forward still runs, as `autograd.grad` inside the block recomputes it, is
        short by nature: that is no error.
        """
        recorder.replay_misses += 1
        policy = self.on_miss or ("raise" if collective else "recompute")
        if policy == "raise" and not recorder.is_partial:
            where = place(self.name, site, recorder.labels)
            raise ReplayError(too_few(where, recorder._cursor, recorder.sites))

    def _examine(
        self,
        recorder: RecomputeReplayRecorder[T],
        at: int,
        recorded: T,
        old_inputs: Any,
        fn: Callable[[], T],
        site: str,
        inputs: Any,
    ) -> None:
        """Decide again, aside, and report how the record and its inputs differ."""
        if self._verifying is None:
            return
        report, margin = self._verifying
        fresh = detached(run_uncounted(fn))
        drift = run_outside(lambda: measure(recorded, fresh, old_inputs, inputs, margin))
        report.checked += 1
        if drift is not None:
            report.drifts.append(Drift(self.name, site, at, *drift, labels=recorder.labels))

    def _refuse_unbound(self, site: str) -> None:
        if self._binding.mode is None and is_recomputing() and not is_outside():
            raise ReplayError(unbound(place(self.name, site, current_labels())))


# A compiled block leaves its graph here: Dynamo would write the choice into the graph. Unlike
# `torch.compiler.disable` this loads the compiler at the first call, not at import (0.9 s).
_decide_eagerly: Callable[..., Any] = _disable_dynamo(RecomputeReplay.decide)


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone()


def _finish(
    recorder: RecomputeReplayRecorder[T],
    on_record_exit: Callable[[RecomputeReplayRecorder[T]], None],
) -> None:
    on_record_exit(recorder)
    recorder.seal()
