"""The flash-attn package, where it is installed."""

from torch import Tensor

from longpack.kernels.call import KernelCall
from longpack.kernels.packed import PackedIndex
from longpack.kernels.segments import Segments
from longpack.kernels.varlen import attend_varlen, cuda_reasons, package_reasons

NAME: str = "flash_attn"
BACKEND: str = "flash"


def reasons_against(call: KernelCall) -> list[str]:
    """List why a call cannot run: device, dtype, head size, package missing or too old."""
    # From 2.1 on, causal masks are aligned at the bottom right; before, at the top left.
    return cuda_reasons(call) + package_reasons("flash-attn", (2, 1))


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Attend with flash_attn_varlen_func; see `kernels.attend`."""
    return attend_varlen(_attend_packed, query, key, value, segments, scale)


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, index: PackedIndex, scale: float
) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=index.cu_seqlens_q,
        cu_seqlens_k=index.cu_seqlens_k,
        max_seqlen_q=index.max_seqlen_q,
        max_seqlen_k=index.max_seqlen_k,
        softmax_scale=scale,
        causal=True,
    )
