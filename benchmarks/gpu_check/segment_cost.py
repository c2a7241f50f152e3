"""What does one more segment cost, at equal area?"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpu_check.clock import Clock
from gpu_check.problems import Heads, Inputs, attention, whole_segments
from longpack.packing import PackedRow


@dataclass(frozen=True)
class SegmentTime:
    """Hold the median times of one row cut into some segments."""

    segments: int
    area: int
    forward_ms: float
    backward_ms: float

    @property
    def ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class SegmentCost:
    """Hold what a further segment adds to a pass, in microseconds.

    Args:
        lengths: `equal`, or `uneven`: a kernel may join equal segments, and real documents end
            inside the blocks that a kernel computes.
        forward_us, backward_us: as fitted to `times`, constant cost and area apart.
        worst_misfit: largest difference of a fitted time from the measured one, relative. Where
            it is large, time is not linear in area: segments are shorter than a kernel's blocks.
        beyond_area_us: per further segment of the row with most, forward and backward, all time
            beyond what its area takes at the rate of one long segment.
    """

    kernel: str
    heads: Heads
    tokens: int
    lengths: str
    times: tuple[SegmentTime, ...]
    forward_us: float
    backward_us: float
    worst_misfit: float
    beyond_area_us: float


def equal_lengths(tokens: int, segments: int) -> list[int]:
    """Cut a row into equal segments."""
    return [tokens // segments] * segments


def uneven_lengths(tokens: int, segments: int) -> list[int]:
    """Cut a row into pairs of segments of half to one and a half times the equal length."""
    if segments == 1:
        return [tokens]
    generator, size, lengths = random.Random(0), tokens // segments, []
    for _ in range(segments // 2):
        more = generator.randint(1, size // 2)
        lengths += [size - more, size + more]
    return lengths


LENGTHS: dict[str, Callable[[int, int], list[int]]] = {
    "equal": equal_lengths,
    "uneven": uneven_lengths,
}


def measure_segment_cost(
    kernel: str,
    heads: Heads,
    lengths: str,
    tokens: int,
    counts: Sequence[int],
    dtype: torch.dtype,
    clock: Clock,
) -> SegmentCost:
    """Time the same tokens as 1, 8, 64, ... segments, and fit what a segment adds."""
    inputs, times = Inputs.draw(tokens, heads, dtype, clock.device), []
    for count in counts:
        row = PackedRow.from_lengths(LENGTHS[lengths](tokens, count))
        function = attention(kernel, whole_segments(row))
        ms = clock.attention_ms(function, inputs.leaves(), inputs.grad_out)
        times.append(SegmentTime(count, row.area, *ms))
    forward_us, forward_misfit = fit(times, [t.forward_ms for t in times])
    backward_us, backward_misfit = fit(times, [t.backward_ms for t in times])
    misfit = max(forward_misfit, backward_misfit)
    fitted = (forward_us, backward_us, misfit)
    return SegmentCost(kernel, heads, tokens, lengths, tuple(times), *fitted, beyond_area_us(times))


def beyond_area_us(times: Sequence[SegmentTime]) -> float:
    """Return what each further segment of the last row adds beyond its area at the first's rate."""
    first, last = times[0], times[-1]
    beyond_ms = last.ms - first.ms * last.area / first.area
    return 1e3 * beyond_ms / (last.segments - first.segments)


def fit(times: Sequence[SegmentTime], ms: Sequence[float]) -> tuple[float, float]:
    """Fit ms = constant + a * area + c * segments; return c in microseconds, and the misfit.

    Least squares of relative errors: the area of one segment over all tokens is hundreds of times
    that of many, and its noise would drown what they cost.
    """
    columns = np.array([(1.0, t.area, t.segments) for t in times])
    scale = columns.max(axis=0)
    measured = np.array(ms)[:, None]
    relative = columns / scale / measured
    solution = np.linalg.lstsq(relative, np.ones(len(times)), rcond=None)[0]
    misfit = np.abs(relative @ solution - 1.0).max()
    return float(1e3 * solution[2] / scale[2]), float(misfit)
