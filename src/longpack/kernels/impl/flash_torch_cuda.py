"""The varlen flash attention that is built into torch's CUDA wheels: no extra install.

Uses the two aten ops beneath `torch.nn.attention.varlen`, because that module's signature
changed between torch 2.10 and 2.13 and theirs did not. Their causal mask is aligned at the bottom
right, and they take fewer key/value heads than query heads.

What is said here of the ops is from torch's sources: log-sum-exps are float32 `[heads, rows]`, the
backward reads them as such without asking for strides, and its random state not at all where
nothing is dropped. It adds up the gradient of query in any order, and so do sums over a key that
several segments share, unless `torch.use_deterministic_algorithms(True)`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longpack.kernels.call import KernelCall
from longpack.kernels.merge import lse_dtype as lse_dtype  # TiledKernel asks for it
from longpack.kernels.merge import merge_
from longpack.kernels.packed import PackedIndex, PackedTiles, Rows, Tiles
from longpack.kernels.segments import Segments
from longpack.kernels.varlen import attend_varlen, cuda_reasons, pad_heads, padded_head_dim

NAME: str = "flash_torch_cuda"
BACKEND: str = "flash"


def reasons_against(call: KernelCall) -> list[str]:
    """List why a call cannot run: device, dtype, head size, a torch built without flash."""
    reasons = cuda_reasons(call)
    if torch.version.hip:
        reasons.append("torch is built for ROCm, whose log-sum-exps may be laid out otherwise")
    if not torch.backends.cuda.is_flash_attention_available():
        reasons.append(f"torch {torch.__version__} is built without flash attention")
    return reasons


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Attend with torch's own CUDA flash kernels; see `kernels.attend`."""
    return attend_varlen(_attend_packed, query, key, value, segments, scale)


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, index: PackedIndex, scale: float
) -> Tensor:
    out: Any = _FlashTorchCuda.apply(query, key, value, index, scale)
    return out


class _FlashTorchCuda(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, index: PackedIndex, scale: float
    ) -> Tensor:
        out, lse, rng_state, unused, _ = _forward_op(
            query, key, value, *_lengths(index), 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, lse, rng_state, unused)
        ctx.index, ctx.scale = index, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        *saved, rng_state, unused = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        grad_inputs = _backward_op(
            grad_out, *saved, *_lengths(ctx.index), 0.0, True, rng_state, unused, scale=ctx.scale
        )
        return *grad_inputs, None, None


def forward_tiles(
    tiles: Tiles,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend into `out` `[Tq, Hq, D]` and `lse` `[Tq, Hq]`, all tiles of one kind in one call.

    Nothing waits for the device: lengths and gathers are built when tiles first meet it.
    """
    head_dim = query.shape[-1]
    dim = padded_head_dim(head_dim)
    for call in tiles.packed(query.device):
        inputs = (call.queries.read(query), call.keys.read(key), call.keys.read(value))
        padded = (pad_heads(x, dim) for x in inputs)
        part_out, part_lse, *_ = _forward_op(
            *padded, *_lengths(call), 0.0, call.causal, False, scale=scale
        )
        part = (part_out[..., :head_dim], part_lse.t())
        if call.continues:
            merged = (call.queries.read(out), call.queries.read(lse))
            merge_(*merged, *part)
            if call.queries.index is None:  # views: merged in place
                continue
            part = merged
        call.queries.write(out, part[0])
        call.queries.write(lse, part[1])


def backward_tiles(
    tiles: Tiles,
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
    """Send `grad_out` back through the tiles, given the merged `out` and `lse`.

    Each call is right by itself, as in `flash_cpu`, for the op reads nothing of the forward but
    `out` and `lse`.
    """
    head_dim = query.shape[-1]
    dim = padded_head_dim(head_dim)
    rng_state = torch.empty(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, device=query.device)
    for call in tiles.packed(query.device):
        grad, queries, outs = (pad_heads(call.queries.read(x), dim) for x in (grad_out, query, out))
        keys, values = (pad_heads(call.keys.read(x), dim) for x in (key, value))
        lses = call.queries.read(lse).t().contiguous()
        saved = (grad, queries, keys, values, outs, lses)
        to_query, to_key, to_value = _backward_op(
            *saved, *_lengths(call), 0.0, call.causal, rng_state, unused, scale=scale
        )
        put = Rows.add if call.continues else Rows.write
        put(call.queries, grad_query, to_query[..., :head_dim])
        put = Rows.write if fresh_keys else Rows.add
        put(call.keys, grad_key, to_key[..., :head_dim])
        put(call.keys, grad_value, to_value[..., :head_dim])


def _lengths(index: PackedIndex | PackedTiles) -> tuple[Tensor, Tensor, int, int]:
    return index.cu_seqlens_q, index.cu_seqlens_k, index.max_seqlen_q, index.max_seqlen_k


def _forward_op(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return torch.ops.aten._flash_attention_forward(*args, **kwargs)


def _backward_op(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return torch.ops.aten._flash_attention_backward(*args, **kwargs)
