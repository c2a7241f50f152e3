"""Attend through a varlen kernel: pad heads, gather rows, call it, and put the rows back."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from longpack.kernels.call import KernelCall
from longpack.kernels.packed import PackedIndex
from longpack.kernels.segments import Segments

HEAD_DIM_MULTIPLE = 8  # the CUDA flash kernels load heads in blocks of 16 bytes
MAX_HEAD_DIM = 256


class VarlenKernel(Protocol):
    """Attend packed rows, causal and aligned at the bottom right, differentiably.

    Query [rows, Hq, D], key and value [rows, Hkv, D] hold sequence after sequence, as the
    cumulative lengths of `index` say; the output is [rows, Hq, D].
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, index: PackedIndex, scale: float
    ) -> Tensor:
        """Return the output of the packed rows."""
        ...


def cuda_reasons(call: KernelCall) -> list[str]:
    """List why no CUDA flash kernel can run a call."""
    reasons = []
    if call.device_type != "cuda":
        reasons.append(f"runs on cuda, not {call.device_type}")
    if not torch.cuda.is_available():
        reasons.append("torch sees no CUDA device")
    elif torch.cuda.get_device_capability() < (8, 0):
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        reasons.append(f"needs compute capability 8.0, the device has {capability}")
    if call.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"{call.dtype} is not float16 or bfloat16")
    if max(call.head_dim, call.v_head_dim) > MAX_HEAD_DIM:
        reasons.append(
            f"heads of {max(call.head_dim, call.v_head_dim)} are larger than {MAX_HEAD_DIM}"
        )
    return reasons


def package_reasons(package: str, oldest: tuple[int, int]) -> list[str]:
    """List why an installed package cannot serve: missing, or before version `oldest`."""
    installed = installed_version(package)
    if installed is None:
        return [f"the package {package} is not installed"]
    if tuple(map(int, installed.split(".")[:2])) < oldest:
        return [f"needs {package} {oldest[0]}.{oldest[1]}, {installed} is installed"]
    return []


@cache
def installed_version(package: str) -> str | None:
    """Return a package's version or None; cached, for every attention call chooses a kernel."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def attend_varlen(
    kernel: VarlenKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
) -> Tensor:
    """Attend as `kernels.attend` says through a kernel for packed rows.

    Heads are padded with zeros to one common multiple of 8, which is exact. Rows are gathered
    only where they are not packed already; keys that segments share are gathered once for each,
    and their gradients are summed in float32 and rounded once.
    """
    if not segments.bounds:  # a kernel may refuse zero sequences; the graph must not end here
        out: Any = _AttendNothing.apply(query, key, value)
        return out
    index = segments.packed(query.device)
    v_head_dim = value.shape[-1]
    head_dim = padded_head_dim(max(query.shape[-1], v_head_dim))
    query, key, value = (pad_heads(x, head_dim) for x in (query, key, value))
    if index.query_index is not None:
        query = query.index_select(0, index.query_index)
    if index.key_index is not None:
        key, value = (_gather(x, index.key_index) for x in (key, value))
    out = kernel(query, key, value, index, scale)[..., :v_head_dim]
    if index.query_index is None:
        return out
    rows = out.new_zeros(segments.num_queries, *out.shape[1:])
    return rows.index_copy(0, index.query_index, out)


def padded_head_dim(head_dim: int) -> int:
    """Return the least size of heads that kernels take, in numbers."""
    return -(-head_dim // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


def pad_heads(x: Tensor, head_dim: int) -> Tensor:
    """Return heads of `head_dim` as kernels load them: padded with zeros, which add nothing.

    The numbers of a head are adjacent and begin at a multiple of 16 bytes, which no kernel checks,
    and which K and V side by side in one row miss where their sizes are such.
    """
    if x.shape[-1] < head_dim:
        return F.pad(x, (0, head_dim - x.shape[-1]))
    *strides, last = x.stride()
    if last == 1 and all(n % HEAD_DIM_MULTIPLE == 0 for n in (*strides, x.storage_offset())):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    gathered: Any = _Gather.apply(rows, index)
    return gathered


class _Gather(torch.autograd.Function):
    """Select rows; the backward adds up the gradients of a repeated row before it rounds."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None]:
        (index,), grad = ctx.saved_tensors, grads[0]
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        total = grad.new_zeros(ctx.num_rows, *grad.shape[1:], dtype=dtype)
        return total.index_add_(0, index, grad.to(dtype)).to(grad.dtype), None


class _AttendNothing(torch.autograd.Function):
    """Return zeros that still lead back to query, key and value, with zero gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return query.new_zeros(*query.shape[:2], value.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors)
