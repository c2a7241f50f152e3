"""Time contenders against each other in one run, and say on what machine."""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def time_in_turn(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Call every contender once a round, in turn, and return its times in milliseconds.

    Machines are shared and noisy, so contenders are compared within a round: see `ratio`.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(-warmup, rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:  # nobody always runs first
            began = time.perf_counter()
            contenders[name]()
            if turn >= 0:
                times[name].append((time.perf_counter() - began) * 1e3)
    return times


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> float:
    """Return the median over rounds of the time of `name` over that of `base`."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


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
