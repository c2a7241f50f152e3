"""Flash attention on CPU: torch's CPU flash op tile by tile, in O(tokens) memory, with no mask.

Measured on torch 2.13: the op takes [B, H, L, D] views of any strides but silently reads garbage
where the last one is not 1; it aligns causal masks at the top left; it takes fewer key/value
heads than query heads and needs equal head sizes; float64, float32, bfloat16 and float16 run, and
lse is float32 except in float64. It returns tensors laid out like its inputs, so row-major views
in give row-major views out and no call copies its inputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from longpack.kernels.blocks import BlockedRows
from longpack.kernels.call import KernelCall
from longpack.kernels.merge import lse_dtype as lse_dtype  # TiledKernel asks for it
from longpack.kernels.merge import merge_
from longpack.kernels.segments import Segments
from longpack.kernels.tiles import Tile

NAME: str = "flash_cpu"
BACKEND: str = "flash"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FORWARD_OP = "_scaled_dot_product_flash_attention_for_cpu"


def reasons_against(call: KernelCall) -> list[str]:
    """List why a call cannot run: another device, another dtype, a torch without the op."""
    reasons = []
    if call.device_type != "cpu":
        reasons.append(f"runs on cpu, not {call.device_type}")
    if call.dtype not in DTYPES:
        reasons.append(f"{call.dtype} is not float64, float32, bfloat16 or float16")
    if not hasattr(torch.ops.aten, FORWARD_OP):
        reasons.append(f"torch {torch.__version__} has no aten::{FORWARD_OP}")
    return reasons


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Attend segment by segment; see `kernels.attend`.

    Heads of unequal size are padded with zeros to the larger: zeros add nothing to a score, and
    the padded columns of the output are cut off, so the result is exact.
    """
    head_dim, v_head_dim = key.shape[-1], value.shape[-1]
    if head_dim < v_head_dim:
        query, key = (F.pad(x, (0, v_head_dim - head_dim)) for x in (query, key))
    elif v_head_dim < head_dim:
        value = F.pad(value, (0, head_dim - v_head_dim))
    out: Any = _FlashCpu.apply(query, key, value, segments, scale)
    return out[..., :v_head_dim]


class _FlashCpu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
    ) -> Tensor:
        query, key, value = (_with_unit_stride(x) for x in (query, key, value))
        out = query.new_empty(query.shape)
        lse = query.new_empty(query.shape[:2], dtype=lse_dtype(query.dtype))
        forward_tiles(segments.tiles, query, key, value, scale, out, lse)
        for start, stop in segments.padding:
            out[start:stop].zero_()
            lse[start:stop].fill_(-torch.inf)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        segments: Segments = ctx.segments
        # A row of keys that several segments share sums their gradients before it is rounded.
        dtype = lse_dtype(key.dtype) if segments.keys_overlap else key.dtype
        grad_query = query.new_empty(query.shape)
        grad_key, grad_value = (x.new_zeros(x.shape, dtype=dtype) for x in (key, value))
        for start, stop in segments.padding:
            grad_query[start:stop].zero_()
        saved = (query, key, value, out, lse)
        grad_inputs = (grad_query, grad_key, grad_value)
        backward_tiles(segments.tiles, grads[0], *saved, ctx.scale, *grad_inputs)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def forward_tiles(
    tiles: tuple[Tile, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend tile by tile into `out` [Tq, Hq, D] and `lse` [Tq, Hq].

    A tile that `continues` is merged into what is there, any other one overwrites it. Tiles of
    one query row may come in several calls, with different keys: `out` in the dtype of `lse` then
    rounds nothing between them.
    """
    queries, keys, values, outs, lses = map(BlockedRows, (query, key, value, out, lse))
    for tile in tiles:
        q, k = tile.queries, tile.keys
        inputs = (queries.read(q), keys.read(k), values.read(k))
        tile_out, tile_lse = _forward_op(*inputs, is_causal=tile.causal, scale=scale)
        if tile.continues:
            merged = (outs.read(q), lses.read(q))
            merge_(*merged, tile_out, tile_lse)
            if q.adjacent:  # merged in place
                continue
            tile_out, tile_lse = merged
        outs.write(q, tile_out)
        lses.write(q, tile_lse)


def backward_tiles(
    tiles: tuple[Tile, ...],
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    fresh_keys: bool = False,
) -> None:
    """Send `grad_out` back through every tile, given the merged `out` and `lse`.

    The weight of a key is exp(score - lse) with the merged lse, and the row sum of the softmax's
    backward is grad_out . out with the merged out, so each tile's backward is right by itself.
    Adds into `grad_key` and `grad_value`, or overwrites them with `fresh_keys`, where no two tiles
    share keys; into `grad_query` a tile that `continues` adds, any other one overwrites.
    """
    grads, queries, outs, lses = map(BlockedRows, (grad_out, query, out, lse))
    keys, values = map(BlockedRows, (key, value))
    grad_queries, grad_keys, grad_values = map(BlockedRows, (grad_query, grad_key, grad_value))
    for tile in tiles:
        q, k = tile.queries, tile.keys
        inputs = (grads.read(q), queries.read(q), keys.read(k), values.read(k))
        saved = (outs.read(q), lses.read(q))
        to_query, to_key, to_value = _backward_op(*inputs, *saved, 0.0, tile.causal, scale=scale)
        put = BlockedRows.add if tile.continues else BlockedRows.write
        put(grad_queries, q, to_query)
        put = BlockedRows.write if fresh_keys else BlockedRows.add
        put(grad_keys, k, to_key)
        put(grad_values, k, to_value)


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward_op(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(*args, **kwargs)


def _backward_op(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return op.default(*args, **kwargs)
