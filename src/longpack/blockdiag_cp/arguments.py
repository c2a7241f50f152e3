"""What attention is given, checked before anything moves: types, layouts, scale."""

from typing import Any

import torch

from longpack.blockdiag_cp.step import CpStep
from longpack.errors import StepError, UnsupportedError, rank_prefix
from longpack.kernels import scale_fault


def check_types(
    step: Any,
    tensors: dict[str, Any],
    scale: Any,
    attn_mask: Any,
    is_causal: Any,
    enable_gqa: Any,
) -> None:
    """Refuse arguments that are not what attention under a step can take.

    Raises:
        StepError: a step that is none, or query, key or value that are not strided tensors with
            heads.
        UnsupportedError: a scale that is not a number above 0, or flags that are not bools.
    """
    if not isinstance(step, CpStep):
        raise StepError(f"step is {type(step).__name__}; pass the CpStep that shard_batch made")
    prefix = rank_prefix(step.rank, step.world_size)
    wrong = [f"{name} is {_fault(x)}" for name, x in tensors.items() if _fault(x)]
    if wrong:
        raise StepError(f"{prefix}attention needs strided tensors with heads: {'; '.join(wrong)}")
    fault = scale_fault(scale)
    refused = [fault] if fault else []
    if not isinstance(attn_mask, torch.Tensor | None):
        refused.append(f"attn_mask={type(attn_mask).__name__} (leave it out)")
    if not isinstance(is_causal, bool | None):
        refused.append(f"is_causal={type(is_causal).__name__} (leave it out)")
    if not isinstance(enable_gqa, bool):
        refused.append(f"enable_gqa={type(enable_gqa).__name__} (a bool)")
    if refused:
        raise UnsupportedError(f"{prefix}cp_blockdiag_sdpa cannot honour {'; '.join(refused)}")


def _fault(x: Any) -> str | None:
    """Say why a value cannot be query, key or value of any step."""
    if not isinstance(x, torch.Tensor):
        return f"{type(x).__name__}, no tensor"
    if x.is_nested or x.layout is not torch.strided:
        return f"a tensor of layout {x.layout}"
    if x.dim() == 4 and not (x.shape[1] and x.shape[3]):
        return f"{tuple(x.shape)}, without heads"
    return None
