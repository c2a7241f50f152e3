"""Attention by a full score matrix: the reference. Runs anywhere, in O(queries x keys) memory."""

import torch
from torch import Tensor

from longpack.kernels.call import KernelCall
from longpack.kernels.segments import Segments

NAME: str = "dense"
BACKEND: str = "dense"


def reasons_against(call: KernelCall) -> list[str]:
    """List why a call cannot run densely: only a dtype without fractions."""
    return [] if call.dtype.is_floating_point else [f"{call.dtype} is not a floating-point dtype"]


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Attend with plain differentiable torch, low precision in float32; see `kernels.attend`."""
    heads = (key.shape[1], query.shape[1] // key.shape[1])
    dtype = query.dtype if query.dtype == torch.float64 else torch.float32
    with torch.autocast(query.device.type, enabled=False):
        grouped = query.to(dtype).unflatten(1, heads)
        scores = torch.einsum("qhgd,khd->hgqk", grouped * scale, key.to(dtype))
        visible = _visible(segments, query.device)
        # A finite filler keeps rows that see nothing free of nan, forward and backward; they
        # become exact zeros below.
        scores = scores.masked_fill(~visible, torch.finfo(dtype).min)
        weights = scores.softmax(-1).masked_fill(~visible, 0.0)
        out = torch.einsum("hgqk,khd->qhgd", weights, value.to(dtype))
    return out.flatten(1, 2).to(query.dtype)


def _visible(segments: Segments, device: torch.device) -> Tensor:
    first, stop = segments.key_ranges(device).unsqueeze(-1).unbind(1)
    keys = torch.arange(segments.num_keys, device=device)
    return (keys >= first) & (keys < stop)
