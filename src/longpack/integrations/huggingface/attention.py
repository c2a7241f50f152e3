"""The attention and mask functions that transformers calls by name."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from longpack.blockdiag_cp import CpStep, cp_blockdiag_sdpa
from longpack.blockdiag_cp.carry import resolve_step
from longpack.errors import StepError, UnsupportedError, rank_prefix

# Model keywords that transformers hands to every attention call and that ask nothing of it.
INERT_ARGUMENTS = frozenset(
    {
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "shift_labels",
    }
)


def register(name: str = "longpack", inert_arguments: Iterable[str] = ()) -> None:
    """Make `attn_implementation=name` known to transformers, with its mask function.

    Args:
        name: what models are given as their attention implementation.
        inert_arguments: further model keywords that do not concern attention. transformers hands
            every keyword to attention, and one that is not known to be inert is refused, since
            it might change what attention should compute.
    """
    inert = INERT_ARGUMENTS | set(inert_arguments)
    AttentionInterface.register(name, partial(_attention, inert=inert))
    AttentionMaskInterface.register(name, _no_mask)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cp_step: CpStep | None = None,
    *,
    inert: frozenset[str],
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend under the step; query `[1, H, L, D]`, K/V `[1, Hkv, L, D]`, out `[1, L, H, Dv]`."""
    step = resolve_step(cp_step)
    if step is None:
        raise StepError(
            f"{_named(module)} runs with attn_implementation='longpack' but without a step, so it "
            "does not know where documents are: call "
            "model(**longpack.shard_batch(batch, cp_mesh).inputs), or pass cp_step="
        )
    refused = _refusals(step, attention_mask, dropout, inert, arguments)
    if refused:
        layer = f"{rank_prefix(step.rank, step.world_size)}{_named(module)}"
        raise UnsupportedError(f"{layer} asks what is not honoured: {'; '.join(refused)}")
    # a graph with its layer's number in it would be one layer's alone
    layer = None if torch.compiler.is_compiling() else getattr(module, "layer_idx", None)
    out = cp_blockdiag_sdpa(
        query, key, value, scale=scaling, enable_gqa=True, step=step, layer=layer
    )
    return out.transpose(1, 2), None


def _named(module: torch.nn.Module) -> str:
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"


def _refusals(
    step: CpStep,
    attention_mask: torch.Tensor | None,
    dropout: float,
    inert: frozenset[str],
    arguments: dict[str, Any],
) -> list[str]:
    """Name every argument that would change the result and is not honoured."""
    refused = []
    if attention_mask is not None:
        refused.append(
            f"attention_mask of shape {tuple(attention_mask.shape)} (put masks in the batch that "
            "shard_batch reads)"
        )
    if dropout:
        refused.append(f"dropout={dropout} (set attention_dropout=0.0 in the model's config)")
    for name, value in arguments.items():
        if name in inert or value is None or value is False:
            continue
        reason = _refusal(name, value, step)
        if reason:
            refused.append(reason)
    return refused


def _refusal(name: str, value: Any, step: CpStep) -> str | None:
    """Say why one argument that is set is not honoured; None where it asks nothing."""
    if name == "is_causal":
        return None  # True: attention under a step is causal
    if name == "sliding_window":
        longest = max(step.plan.row.lengths, default=0)
        if value >= longest:
            return None  # no query reaches further back than its document's start
        return f"sliding_window={value} (shorter than the longest document, {longest} tokens)"
    if name == "use_cache":
        return "use_cache=True (pass use_cache=False: a packed row has no cache to continue)"
    if name == "s_aux":
        return f"s_aux of shape {tuple(value.shape)} (attention sinks)"
    if name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"):
        return f"{name} (documents come with cp_step; put {name} in the batch for shard_batch)"
    shown = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return f"{name} {shown} (pass it to register(inert_arguments=) if attention may ignore it)"


def _no_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    **_: Any,
) -> None:
    """Build no mask: the step masks. Refuse what says that a mask was expected."""
    refused = []
    if attention_mask is not None:
        refused.append(
            f"attention_mask of shape {tuple(attention_mask.shape)}: put it in the batch that "
            "shard_batch reads, and do not pass it to the model"
        )
    if kv_length != q_length:
        refused.append(f"a cache of {kv_length - q_length} keys: pass use_cache=False")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        refused.append(f"chunked attention ({type(config).__name__}.attention_chunk_size)")
    if getattr(config, "index_topk", None) is not None:
        refused.append(f"sparse attention indices ({type(config).__name__}.index_topk)")
    if refused:
        raise UnsupportedError(f"attn_implementation='longpack' cannot honour {'; '.join(refused)}")
