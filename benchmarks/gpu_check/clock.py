"""Time work on a device, within a limit for the whole command."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Pass = Callable[[], object]


@dataclass(frozen=True)
class Clock:
    """Measure medians: with CUDA events on a GPU, with the host's clock on a CPU.

    Args:
        device: `cuda` or `cpu`.
        repeats: timed rounds, after one to warm up.
        stop_at: `time.monotonic()` in seconds, after which no case and no repeat begins.
    """

    device: str
    repeats: int
    stop_at: float

    def spent(self) -> bool:
        """Say whether the time for timed cases is used up."""
        return time.monotonic() >= self.stop_at

    def median_ms(self, *passes: Pass) -> tuple[float, ...]:
        """Run the passes one after another, again and again; return the median ms of each.

        On a GPU rounds are queued without waiting, so that launching one hides behind another
        wherever the device, not the host, is the slower one.
        """
        self._round(passes)
        self._wait()
        rounds = [self._round(passes)]
        while len(rounds) < self.repeats and not self.spent():
            rounds.append(self._round(passes))
        self._wait()
        times = [[self._between(a, b) for a, b in pairwise(stamps)] for stamps in rounds]
        return tuple(statistics.median(column) for column in zip(*times, strict=True))

    def attention_ms(
        self, function: Callable[..., Tensor], leaves: list[Tensor], grad_out: Tensor
    ) -> tuple[float, float]:
        """Return the median ms of the forward and of the backward of a differentiable call."""
        outs: list[Tensor] = []
        forward_ms, backward_ms = self.median_ms(
            lambda: outs.append(function(*leaves)),
            lambda: torch.autograd.grad(outs.pop(), leaves, grad_out),
        )
        return forward_ms, backward_ms

    def _round(self, passes: tuple[Pass, ...]) -> list[Any]:
        stamps = [self._stamp()]
        for one in passes:
            one()
            stamps.append(self._stamp())
        return stamps

    def _stamp(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        return (stop - start) * 1e3 if self.device == "cpu" else start.elapsed_time(stop)

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
