"""How fast are the kernels on the shares of ranks, against one call over the whole row?"""

import statistics
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_check.clock import Clock
from gpu_check.problems import Heads, Inputs, attention, shares
from longpack.plan import Plan


@dataclass(frozen=True)
class RankTime:
    """Hold one rank's share and its median times."""

    rank: int
    area: int
    segments: int
    query_rows: int
    key_rows: int
    forward_ms: float
    backward_ms: float

    @property
    def ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class SplitTime:
    """Hold the times of all ranks of a plan; `cp` 1 is one call over the whole row."""

    kernel: str
    row: str
    cp: int
    layout: str
    heads: Heads
    ranks: tuple[RankTime, ...]

    @property
    def area(self) -> int:
        """Query-key pairs of all ranks: those of the row."""
        return sum(rank.area for rank in self.ranks)

    @property
    def flops(self) -> float:
        """Floating-point operations of all ranks, forward and backward."""
        return self.area * self.heads.pair_flops

    @property
    def sum_ms(self) -> float:
        """Time of all ranks one after another."""
        return sum(rank.ms for rank in self.ranks)

    @property
    def slowest_ms(self) -> float:
        """Time of the slowest rank: what attention takes when ranks run side by side."""
        return max(rank.ms for rank in self.ranks)

    @property
    def tflops(self) -> float:
        """Rate of all ranks one after another, in TFLOP/s."""
        return self.flops / self.sum_ms / 1e9

    @property
    def slowest_over_mean(self) -> float:
        """Imbalance in time; 1.0 is perfect."""
        return self.slowest_ms / statistics.mean(rank.ms for rank in self.ranks)


@dataclass(frozen=True)
class CausalTime:
    """Hold the time of torch's dense causal call over one document: no segments, no plan."""

    heads: Heads
    forward_ms: float
    backward_ms: float

    @property
    def ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


def measure_split(
    kernel: str, row: str, plan: Plan, heads: Heads, dtype: torch.dtype, clock: Clock
) -> SplitTime:
    """Time every rank of a plan in turn; keys and values are there already."""
    inputs = Inputs.draw(plan.padded_length, heads, dtype, clock.device)
    times = []
    for share in shares(plan, clock.device):
        mine, segments = share.of(inputs), share.segments
        ms = clock.attention_ms(attention(kernel, segments), mine.leaves(), mine.grad_out)
        counts = (len(segments.bounds), segments.num_queries, segments.num_keys)
        times.append(RankTime(share.rank, share.area, *counts, *ms))
    return SplitTime(kernel, row, plan.world_size, plan.layout, heads, tuple(times))


def measure_causal(tokens: int, heads: Heads, dtype: torch.dtype, clock: Clock) -> CausalTime:
    """Time torch's dense causal attention over one document."""
    inputs = Inputs.draw(tokens, heads, dtype, clock.device)
    times = clock.attention_ms(_causal_sdpa, inputs.leaves(), inputs.grad_out)
    return CausalTime(heads, *times)


def _causal_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def measure_matmul(side: int, dtype: torch.dtype, clock: Clock) -> float:
    """Return the TFLOP/s of a square matrix product."""
    a = torch.randn(side, side, device=clock.device, dtype=dtype)
    return 2 * side**3 / clock.median_ms(lambda: a @ a)[0] / 1e9
