"""Turns, clocks and threads of the benches."""

import pytest
import torch

from longpack.bench.timing import (
    PROCESS_CLOCKS,
    clock_call,
    clock_in_turn,
    medians,
    on_threads,
    ratio,
    take_turns,
    time_in_turn,
)


def test_nobody_always_runs_first_and_warmup_is_not_told():
    order = []

    def call(name):
        order.append(name)
        return len(order)

    told = take_turns({name: lambda name=name: call(name) for name in "abc"}, rounds=3, warmup=1)
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"
    assert told == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}


def test_without_contenders_there_is_nothing_to_tell():
    assert take_turns({}, rounds=3) == {}
    assert clock_in_turn({}, rounds=3) == {clock: {} for clock in PROCESS_CLOCKS}


def test_a_call_is_clocked_after_its_start():
    """Two clocks that a start and a call move on, in seconds."""
    now = {"sun": 0.0, "water": 0.0}

    def move(sun, water):
        now["sun"] += sun
        now["water"] += water

    clocks = {name: lambda name=name: now[name] for name in now}
    told = clock_call(lambda: move(0.002, 0.001), clocks, start=lambda: move(50.0, 60.0))
    assert told == pytest.approx({"sun": 2.0, "water": 1.0})


def test_times_are_told_by_clock_and_every_call_starts_at_a_barrier():
    events = []
    runs = {name: lambda name=name: events.append(name) for name in "ab"}
    times = clock_in_turn(runs, rounds=2, warmup=0, start=lambda: events.append("|"))
    assert "".join(events) == "|a|b" + "|b|a"
    assert {clock: {n: len(t) for n, t in each.items()} for clock, each in times.items()} == {
        "wall": {"a": 2, "b": 2},
        "processor": {"a": 2, "b": 2},
    }
    assert {n: len(t) for n, t in time_in_turn(runs, rounds=1).items()} == {"a": 1, "b": 1}


def test_ratios_are_paired_within_rounds():
    times = {"a": [1.0, 20.0, 3.0], "b": [2.0, 10.0, 3.0]}
    assert ratio(times, "a", "b") == 1.0  # of 0.5, 2 and 1
    assert medians(times) == {"a": 3.0, "b": 3.0}


def test_threads_are_put_back_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="here"), on_threads(before + 1):
        fail_on(before + 1)
    assert torch.get_num_threads() == before


def fail_on(threads):
    assert torch.get_num_threads() == threads
    raise RuntimeError("here")
