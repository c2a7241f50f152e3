"""Time contenders against each other in one run, and say on what machine."""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Times = dict[str, list[float]]  # milliseconds by contender, one a round
WALL, PROCESSOR = "wall", "processor"
_CLOCKS = {WALL: time.perf_counter, PROCESSOR: time.process_time}


def clock_in_turn(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1
) -> dict[str, Times]:
    """Call every contender once a round, in turn, and return its times by clock.

    Machines are shared and noisy, so contenders are compared within a round: see `ratio`. The
    clocks are `wall`, and `processor`: what all threads of this process used, which other programs
    disturb less.
    """
    times = {clock: {name: [] for name in contenders} for clock in _CLOCKS}
    names = list(contenders)
    for turn in range(-warmup, rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:  # nobody always runs first
            began = {clock: now() for clock, now in _CLOCKS.items()}
            contenders[name]()
            for clock, now in _CLOCKS.items() if turn >= 0 else ():
                times[clock][name].append((now() - began[clock]) * 1e3)
    return times


def time_in_turn(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1
) -> Times:
    """Return the wall times of `clock_in_turn`."""
    return clock_in_turn(contenders, rounds, warmup)[WALL]


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Return each contender's median over rounds."""
    return {name: statistics.median(each) for name, each in times.items()}


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> float:
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
