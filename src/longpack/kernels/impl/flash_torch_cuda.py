"""The varlen flash attention that is built into torch's CUDA wheels: no extra install.

Uses the two aten ops beneath `torch.nn.attention.varlen`, because that module's signature
changed between torch 2.10 and 2.13 and theirs did not. Their causal mask is aligned at the bottom
right, and they take fewer key/value heads than query heads.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longpack.kernels.call import KernelCall
from longpack.kernels.packed import PackedIndex
from longpack.kernels.segments import Segments
from longpack.kernels.varlen import attend_varlen, cuda_reasons

NAME: str = "flash_torch_cuda"
BACKEND: str = "flash"


def reasons_against(call: KernelCall) -> list[str]:
    """List why a call cannot run: device, dtype, head size, a torch built without flash."""
    reasons = cuda_reasons(call)
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


def _lengths(index: PackedIndex) -> tuple[Tensor, Tensor, int, int]:
    return index.cu_seqlens_q, index.cu_seqlens_k, index.max_seqlen_q, index.max_seqlen_k


def _forward_op(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return torch.ops.aten._flash_attention_forward(*args, **kwargs)


def _backward_op(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return torch.ops.aten._flash_attention_backward(*args, **kwargs)
