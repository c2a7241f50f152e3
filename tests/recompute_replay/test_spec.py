"""The interface document, name by name."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import longpack.recompute_replay as door
from longpack.recompute_replay import (
    CheckpointContextFn,
    RecomputeReplay,
    RecomputeReplayRecorder,
    T,
    _Binding,
)


def test_recorder_hands_back_in_order_and_counts_misses() -> None:
    recorder: RecomputeReplayRecorder[str] = RecomputeReplayRecorder()
    assert (recorder._cursor, recorder._records, recorder.replay_misses) == (0, [], 0)
    recorder.record("a")
    recorder.record("b")
    assert len(recorder) == 2
    assert recorder.records == ("a", "b")
    assert recorder._records == ["a", "b"]
    assert [recorder.take(), recorder.take()] == ["a", "b"]
    assert recorder._cursor == 2
    assert recorder.take() is None
    assert recorder.take() is None
    assert recorder.replay_misses == 2
    recorder.rewind()
    assert recorder._cursor == 0
    assert recorder.take() == "a"


def test_recorder_hands_back_the_same_object() -> None:
    recorder: RecomputeReplayRecorder[object] = RecomputeReplayRecorder()
    layout, ids = object(), torch.arange(4)
    recorder.record(layout)
    recorder.record(ids)
    assert recorder.take() is layout
    assert recorder.take() is ids


def test_records_put_there_by_hand_are_handed_back() -> None:
    recorder: RecomputeReplayRecorder[int] = RecomputeReplayRecorder()
    recorder.record(1)
    recorder._records[0] = 5
    recorder._records.append(6)
    assert recorder.records == (5, 6)
    assert [recorder.take(), recorder.take()] == [5, 6]


def test_binding_is_initialised_once_a_thread() -> None:
    binding = _Binding()
    assert isinstance(binding, threading.local)
    assert (binding.recorder, binding.mode) == (None, None)
    binding.mode = "record"
    assert (binding.recorder, binding.mode) == (None, "record")
    binding.recorder = recorder = RecomputeReplayRecorder[int]()
    assert (binding.recorder, binding.mode) == (recorder, "record")
    seen = []
    thread = threading.Thread(target=lambda: seen.append((binding.recorder, binding.mode)))
    thread.start()
    thread.join()
    assert seen == [(None, None)]


def test_scope_binds_nests_and_restores() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes")
    first, second = RecomputeReplayRecorder[int](), RecomputeReplayRecorder[int]()
    assert channel.name == "routes"
    assert isinstance(channel._binding, _Binding)
    assert channel.current() is None
    with channel.scope(first, "record"):
        assert channel.current() == (first, "record")
        with channel.scope(second, "replay"):
            assert channel.current() == (second, "replay")
            with channel.scope(None, "replay"):
                assert channel.current() is None
        assert channel.current() == (first, "record")
    assert channel.current() is None


def test_scope_restores_after_an_exception() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes")
    with pytest.raises(KeyError), channel.scope(RecomputeReplayRecorder(), "record"):
        raise KeyError
    assert channel.current() is None


def test_scope_with_an_unknown_mode_names_the_channel() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes")
    with pytest.raises(ValueError, match="routes"), channel.scope(None, "rewind"):
        pass


def test_a_scope_can_be_entered_again_and_replays_from_the_first_record() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes")
    recorder: RecomputeReplayRecorder[int] = RecomputeReplayRecorder()
    recorder.record(1)
    recorder.record(2)
    scope = channel.scope(recorder, "replay")
    for _ in range(3):
        with scope:
            assert [recorder.take(), recorder.take()] == [1, 2]


def test_a_scope_inside_itself_does_not_move_the_outer_replay() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes")
    recorder: RecomputeReplayRecorder[int] = RecomputeReplayRecorder()
    recorder.record(1)
    recorder.record(2)
    scope = channel.scope(recorder, "replay")
    with scope:
        assert recorder.take() == 1
        with scope:
            assert [recorder.take(), recorder.take()] == [1, 2]
        assert recorder.take() == 2


def test_a_scope_inside_itself_at_once_does_not_move_the_outer_replay() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes")
    recorder: RecomputeReplayRecorder[int] = RecomputeReplayRecorder()
    recorder.record(1)
    scope = channel.scope(recorder, "replay")
    with scope:
        with scope:
            assert recorder.take() == 1
        assert (recorder._cursor, recorder.take()) == (0, 1)
    assert recorder._cursor == 1


def test_two_threads_replay_one_recorder_at_their_own_pace() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes")
    recorder: RecomputeReplayRecorder[int] = RecomputeReplayRecorder()
    for value in range(50):
        recorder.record(value)
    barrier, seen = threading.Barrier(2), []

    def replay() -> None:
        with channel.scope(recorder, "replay"):
            barrier.wait()
            seen.append([recorder.take() for _ in range(50)])

    threads = [threading.Thread(target=replay) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [list(range(50))] * 2
    assert recorder.replay_misses == 0


def test_context_fn_binds_a_fresh_recorder_for_every_call() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes")
    context_fn: CheckpointContextFn = channel.checkpoint_context_fn(None)
    seen = []
    for value in (1, 2):
        forward, recompute = context_fn()
        with forward:
            recorder, mode = channel.current() or pytest.fail("not bound")
            assert mode == "record"
            recorder.record(value)
        with recompute:
            again, mode = channel.current() or pytest.fail("not bound")
            assert (again, mode) == (recorder, "replay")
            seen.append((again.take(), again.take(), again.replay_misses))
    assert seen == [(1, None, 1), (2, None, 1)]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_on_record_exit_runs_once_after_the_other_forward_contexts(by_keyword: bool) -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes")
    events = []

    class Context:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            events.append(f"enter {self.name}")

        def __exit__(self, *exception: object) -> None:
            events.append(f"exit {self.name}")

    def context_fn() -> tuple[Context, Context]:
        return Context("forward"), Context("recompute")

    def hook(recorder: RecomputeReplayRecorder[int]) -> None:
        assert channel.current() is None
        assert not torch.is_grad_enabled()
        events.append(recorder.records)

    wrapped = (
        channel.checkpoint_context_fn(context_fn, on_record_exit=hook)
        if by_keyword
        else channel.checkpoint_context_fn(context_fn, hook)
    )

    def block(x: torch.Tensor) -> torch.Tensor:
        bound = channel.current() or pytest.fail("not bound")
        events.append(bound[1])
        if bound[1] == "record":
            bound[0].record(7)
        return x.sin().exp()

    x = torch.ones(2, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=False, context_fn=wrapped)
    assert events == ["enter forward", "record", "exit forward", (7,)]
    out.sum().backward()
    assert events[4:] == ["enter recompute", "replay", "exit recompute"]


def test_on_record_exit_may_replace_and_change_records() -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("routes")

    def compress(recorder: RecomputeReplayRecorder[torch.Tensor]) -> None:
        recorder._records[0] = recorder._records[0].to(torch.uint8)
        recorder._records[1].add_(1)

    def block(x: torch.Tensor) -> torch.Tensor:
        bound = channel.current() or pytest.fail("not bound")
        if bound[1] == "record":
            bound[0].record(torch.arange(4))
            bound[0].record(torch.arange(4))
        else:
            first, second = bound[0].take(), bound[0].take()
            assert first is not None
            assert second is not None
            assert first.dtype == torch.uint8
            assert second.tolist() == [1, 2, 3, 4]
        return x.sin().exp()

    x = torch.ones(2, requires_grad=True)
    context_fn = channel.checkpoint_context_fn(None, compress)
    checkpoint(block, x, use_reentrant=False, context_fn=context_fn).sum().backward()


def test_on_record_exit_does_not_run_when_the_forward_raised() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes")
    ran = []
    forward, _ = channel.checkpoint_context_fn(None, ran.append)()
    with pytest.raises(KeyError), forward:
        raise KeyError
    assert ran == []
    assert channel.current() is None


def test_two_channels_nest_through_context_fn() -> None:
    first: RecomputeReplay[int] = RecomputeReplay("first")
    second: RecomputeReplay[int] = RecomputeReplay("second")
    context_fn = first.checkpoint_context_fn(second.checkpoint_context_fn(None))
    forward, recompute = context_fn()
    with forward:
        assert [first.decide(lambda: 1), second.decide(lambda: 2)] == [1, 2]
    with recompute:
        assert [second.decide(lambda: 5), first.decide(lambda: 6)] == [2, 1]


def test_the_door_has_the_names_of_the_document() -> None:
    assert T.__name__ == "T"
    for name in ("RecomputeReplay", "RecomputeReplayRecorder", "_Binding", "CheckpointContextFn"):
        assert name in door.__all__
