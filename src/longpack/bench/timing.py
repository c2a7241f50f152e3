"""Time contenders against each other in one run, and say on what machine."""

import os
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

Times = dict[str, list[float]]  # milliseconds by contender, one a round
WALL, PROCESSOR = "wall", "processor"
PROCESS_CLOCKS = {WALL: time.perf_counter, PROCESSOR: time.process_time}
THREAD_CLOCKS = {WALL: time.perf_counter, PROCESSOR: time.thread_time}

Name = TypeVar("Name", str, int)
Told = TypeVar("Told")


def take_turns(
    calls: Mapping[Name, Callable[[], Told]], rounds: int, warmup: int = 0
) -> dict[Name, list[Told]]:
    """Call everyone once a round, in turn, and return what each said, one entry a round.

    The order shifts from round to round, so that nobody always runs first. Ranks that call
    alike keep the same order.

    Args:
        calls: by name.
        rounds: that are told.
        warmup: rounds before them that are not.
    """
    told: dict[Name, list[Told]] = {name: [] for name in calls}
    order = deque(calls)
    order.rotate(warmup)
    for turn in range(-warmup, rounds):
        for name in order:
            said = calls[name]()
            if turn >= 0:
                told[name].append(said)
        order.rotate(-1)
    return told


def clock_call(
    call: Callable[[], Any],
    clocks: Mapping[str, Callable[[], float]] = PROCESS_CLOCKS,
    start: Callable[[], Any] | None = None,
) -> dict[str, float]:
    """Return the milliseconds of one call by clock.

    Args:
        call: what to time.
        clocks: by name, in seconds.
        start: called before the clocks start: a barrier, where ranks start together.
    """
    if start is not None:
        start()
    began = {name: now() for name, now in clocks.items()}
    call()
    return {name: (now() - began[name]) * 1e3 for name, now in clocks.items()}


def clock_in_turn(
    contenders: Mapping[str, Callable[[], Any]],
    rounds: int,
    warmup: int = 1,
    start: Callable[[], Any] | None = None,
) -> dict[str, Times]:
    """Call every contender once a round, in turn, and return its times by clock.

    Machines are shared and noisy, so contenders are compared within a round: see `ratio`. The
    clocks are `wall`, and `processor`: what all threads of this process used, which other programs
    disturb less.

    Args:
        contenders: by name.
        rounds: timed rounds.
        warmup: rounds before them.
        start: called before each, untimed: a barrier, where ranks start together.
    """
    clocked = {name: partial(clock_call, call, start=start) for name, call in contenders.items()}
    told = take_turns(clocked, rounds, warmup)
    return {
        clock: {name: [each[clock] for each in times] for name, times in told.items()}
        for clock in PROCESS_CLOCKS
    }


def time_in_turn(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1
) -> Times:
    """Return the wall times of `clock_in_turn`."""
    return clock_in_turn(contenders, rounds, warmup)[WALL]


def medians(times: Mapping[Name, list[float]]) -> dict[Name, float]:
    """Return each contender's median over rounds."""
    return {name: statistics.median(each) for name, each in times.items()}


def ratio(times: Mapping[Name, list[float]], name: Name, base: Name) -> float:
    """Return the median over rounds of the time of `name` over that of `base`."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Run torch on so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def matmul(size: int) -> Callable[[], torch.Tensor]:
    """Return an fp32 `size`^3 matrix product to time others against: the machine's yardstick."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return lambda: a @ b


def machine() -> dict[str, Any]:
    """Describe the machine and the command of a result."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": " ".join(["longpack", *sys.argv[1:]]),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
