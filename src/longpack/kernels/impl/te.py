"""Transformer Engine's DotProductAttention on packed rows, where the package is installed."""

from torch import Tensor

from longpack.kernels.call import KernelCall
from longpack.kernels.packed import PackedIndex
from longpack.kernels.segments import Segments
from longpack.kernels.varlen import attend_varlen, cuda_reasons, package_reasons

NAME: str = "te"
BACKEND: str = "te"


def reasons_against(call: KernelCall) -> list[str]:
    """List why a call cannot run: device, dtype, head size, package missing or too old."""
    # The mask type padding_causal_bottom_right came with 1.8.
    return cuda_reasons(call) + package_reasons("transformer-engine", (1, 8))


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Attend with DotProductAttention in its packed (thd) format; see `kernels.attend`."""
    return attend_varlen(_attend_packed, query, key, value, segments, scale)


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, index: PackedIndex, scale: float
) -> Tensor:
    from transformer_engine.pytorch import (  # pyright: ignore[reportMissingImports]
        DotProductAttention,
    )

    num_heads, head_dim = query.shape[1:]
    module = DotProductAttention(
        num_attention_heads=num_heads,
        kv_channels=head_dim,
        num_gqa_groups=key.shape[1],
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",
        softmax_scale=scale,
    )
    out = module(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_seqlens_q=index.cu_seqlens_q,
        cu_seqlens_kv=index.cu_seqlens_k,
        max_seqlen_q=index.max_seqlen_q,
        max_seqlen_kv=index.max_seqlen_k,
    )
    return out.view(-1, num_heads, head_dim)
