"""What does it cost to attend in two parts, merged by log-sum-exp, instead of in one call?"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_check.clock import Clock
from gpu_check.problems import Heads, Inputs
from longpack.kernels import TILED, Segments, TiledKernel, Tiles, full_tiles
from longpack.kernels.merge import merge_

Parts = tuple[Tiles, ...]

ONE_CALL_ONLY = "attends in one call; nothing to merge"


@dataclass(frozen=True)
class MergeCost:
    """Hold the median times of one document attended in one call, and in two parts that merge.

    Two parts: each half of the queries attends its own half of the keys; then the later half
    attends the earlier keys, merged into what is there. The query-key pairs are the same.
    A kernel that cannot do that has no times, and `note` says so.
    """

    kernel: str
    heads: Heads
    tokens: int
    note: str | None = None
    one_call_forward_ms: float | None = None
    one_call_backward_ms: float | None = None
    two_parts_forward_ms: float | None = None
    two_parts_backward_ms: float | None = None


@dataclass(frozen=True)
class MergeOp:
    """Hold the median time of merging one output and lse into another, whatever the kernel.

    Args:
        bytes_moved: both read once, one written once.
    """

    heads: Heads
    tokens: int
    ms: float
    bytes_moved: int

    @property
    def gb_per_s(self) -> float:
        """Bytes moved over time."""
        return self.bytes_moved / self.ms / 1e6


def measure_merge_cost(
    kernel: str, heads: Heads, tokens: int, dtype: torch.dtype, clock: Clock
) -> MergeCost:
    """Time both ways of attending one document, where the kernel has both."""
    if kernel not in TILED:
        return MergeCost(kernel, heads, tokens, ONE_CALL_ONLY)
    inputs = Inputs.draw(tokens, heads, dtype, clock.device)
    one, two = (
        clock.median_ms(*passes(TILED[kernel], parts, inputs))
        for parts in (one_part(tokens), two_parts(tokens))
    )
    return MergeCost(kernel, heads, tokens, None, *one, *two)


def one_part(tokens: int) -> Parts:
    """Attend one document in one causal square."""
    return (Segments(((0, tokens, 0, tokens),), tokens, tokens).tiles,)


def two_parts(tokens: int) -> Parts:
    """Attend one document by halves, as a rank does whose earlier keys arrive later."""
    half = tokens // 2
    own = Segments(((0, half, 0, half), (half, tokens, half, tokens)), tokens, tokens)
    return own.tiles, Tiles(full_tiles(((half, tokens, 0, half),)))


def passes(
    kernel: TiledKernel, parts: Parts, inputs: Inputs
) -> tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]:
    """Return a forward that returns output and lse, and the backward after it, gradients.

    Both write into buffers of their own; what parts add up in is as precise as lse.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    scale = query.shape[-1] ** -0.5
    precise = kernel.lse_dtype(query.dtype)
    dtype = query.dtype if len(parts) == 1 else precise
    out, *grads = (torch.empty_like(x, dtype=dtype) for x in (query, query, key, value))
    grad_query, grad_key, grad_value = grads
    lse = query.new_empty(query.shape[:2], dtype=precise)

    def forward() -> list[Tensor]:
        for tiles in parts:
            kernel.forward_tiles(tiles, query, key, value, scale, out, lse)
        return [out, lse]

    def backward() -> list[Tensor]:
        saved = (query, key, value, out.to(query.dtype), lse)
        grad_key.zero_()
        grad_value.zero_()
        for tiles in parts:
            kernel.backward_tiles(
                tiles, inputs.grad_out, *saved, scale, grad_query, grad_key, grad_value
            )
        return grads

    return forward, backward


def measure_merge_op(heads: Heads, tokens: int, dtype: torch.dtype, clock: Clock) -> MergeOp:
    """Time `merge_` of a kernel's output in `dtype` into a float32 one, as parts are merged."""
    shape = (tokens, heads.num_heads, heads.v_head_dim)
    out = torch.randn(shape, device=clock.device)
    other_out = torch.randn(shape, device=clock.device, dtype=dtype)
    lse, other_lse = torch.randn(2, *shape[:2], device=clock.device)
    (ms,) = clock.median_ms(lambda: merge_(out, lse, other_out, other_lse))
    moved = sum(x.nbytes for x in (out, lse, out, lse, other_out, other_lse))
    return MergeOp(heads, tokens, ms, moved)


def measure_copy(side: int, clock: Clock) -> float:
    """Return the GB/s of copying a float32 square: read once, written once."""
    source = torch.randn(side, side, device=clock.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.median_ms(lambda: target.copy_(source))[0] / 1e6
