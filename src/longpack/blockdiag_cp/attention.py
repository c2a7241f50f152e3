"""Block-diagonal causal attention of local queries, over K/V wherever they are."""

import torch
import torch.nn.functional as F

from longpack.blockdiag_cp import state
from longpack.blockdiag_cp.arguments import check_types
from longpack.blockdiag_cp.carry import resolve_step
from longpack.blockdiag_cp.observe import tell_observer
from longpack.blockdiag_cp.operator import name_call
from longpack.blockdiag_cp.step import CpStep
from longpack.collectives import exchange_rows
from longpack.errors import StepError, UnsupportedError, rank_prefix
from longpack.kernels import TILED, KernelCall, attend, choose_kernel


def cp_blockdiag_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    step: CpStep | None = None,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
    layer: int | None = None,
) -> torch.Tensor:
    """Attend each local query to its own document, from its start through the query itself.

    out[i] = sum over j of softmax_j(scale * query[i] . key[j]) value[j], where j runs over the
    rows of i's document up to i, on whatever rank they are. Rows of padding come out zero, with
    zero gradients. A drop-in for `F.scaled_dot_product_attention` on local shards: with no step
    given and none active it is exactly that function.

    Every rank of the cp axis calls it, for the same step, in the same order; the K/V exchange is
    one collective forward and one backward.

    Args:
        query: `[1, num_heads, local_length, head_dim]`, any strides, local rows.
        key: `[1, num_kv_heads, local_length, head_dim]`, of the same dtype and device.
        value: `[1, num_kv_heads, local_length, v_head_dim]`.
        dropout_p: must be 0 under a step.
        scale: softmax scale; 1 / sqrt(head_dim) by default.
        enable_gqa: must be True where num_kv_heads is less than num_heads, which it divides.
        step: the step; by default the one whose `with` block is open.
        attn_mask: must be None under a step, which alone says what is masked.
        is_causal: must not be False under a step.
        layer: of the model, from 0; errors of the exchange name it.

    Returns:
        `[1, num_heads, local_length, v_head_dim]`.

    Raises:
        StepError: shapes that do not fit the step, or a checkpoint recompute without its step.
        UnsupportedError: arguments that are not honoured, or a backend that cannot run, with
            every reason.
    """
    step = resolve_step(step)
    if step is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=bool(is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
        )
    tensors = {"query": query, "key": key, "value": value}
    check_types(step, tensors, scale, attn_mask, is_causal, enable_gqa)
    _check_arguments(step, dropout_p, attn_mask, is_causal)
    _check_shapes(step, query, key, value, enable_gqa)
    heads = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    kernel = _choose(step.attn_backend, query.device.type, query.dtype, *heads)
    # squeezed, not indexed: the backward of an index fills a tensor with zeros first
    rows = tuple(x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    layer = -1 if layer is None else layer
    if kernel in TILED:
        out, _, _ = torch.ops.longpack.attend(*rows, step.token, kernel, scale, layer)
    else:
        state._CP_ATTN_FIRE_COUNT[0] += 1
        keys, values = _bring(rows[1], rows[2], step, name_call(layer, step.name))
        out = attend(kernel, rows[0], keys, values, step.segments, scale)
    return out.transpose(0, 1).unsqueeze(0)


@torch.compiler.assume_constant_result
def _choose(attn_backend: str, device_type: str, dtype: torch.dtype, *heads: int) -> str:
    """Return the kernel's name; while tracing, a constant of the graph."""
    kernel = choose_kernel(attn_backend, KernelCall(device_type, dtype, *heads)).name
    tell_observer(kernel)
    return kernel


def _bring(
    key: torch.Tensor, value: torch.Tensor, step: CpStep, place: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the K and V rows that this rank reads, `[num_keys, num_kv_heads, dim]` each.

    K and V of one row travel side by side, in one message.
    """
    if step.route.kind == "none" and step.route.key_index is None:
        return key[: step.route.num_keys], value[: step.route.num_keys]
    fused = exchange_rows(torch.cat([key, value], dim=-1), step.transport, step.route, place)
    return tuple(fused.split([key.shape[-1], value.shape[-1]], dim=-1))  # pyright: ignore


def _check_arguments(
    step: CpStep, dropout_p: float, attn_mask: torch.Tensor | None, is_causal: bool | None
) -> None:
    refused = []
    if not isinstance(dropout_p, int | float) or dropout_p != 0:
        shown = dropout_p if isinstance(dropout_p, int | float) else type(dropout_p).__name__
        refused.append(f"dropout_p={shown} (attention dropout is not implemented; pass 0.0)")
    masking = "the step masks: causal inside each document, nothing across"
    if attn_mask is not None:
        refused.append(f"attn_mask of shape {tuple(attn_mask.shape)} ({masking}; pass None)")
    if is_causal is False:
        refused.append(f"is_causal=False ({masking}; leave it out)")
    if refused:
        prefix = rank_prefix(step.rank, step.world_size)
        raise UnsupportedError(f"{prefix}cp_blockdiag_sdpa cannot honour {'; '.join(refused)}")


def _check_shapes(
    step: CpStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> None:
    tensors = {"query": query, "key": key, "value": value}
    wrong = [
        f"{n} is {t.dim()}-D, must be [1, H, L, D]" for n, t in tensors.items() if t.dim() != 4
    ]
    if not wrong:
        wrong = _shape_faults(step, query, key, value, enable_gqa)
    wrong += [
        f"{name} is {t.dtype} on {t.device}, must be {query.dtype} on {step.device}"
        for name, t in tensors.items()
        if t.dtype != query.dtype or t.device.type != step.device.type
    ]
    if wrong:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        prefix = rank_prefix(step.rank, step.world_size)
        raise StepError(f"{prefix}attention does not fit its step ({shapes}): {'; '.join(wrong)}")


def _shape_faults(
    step: CpStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> list[str]:
    rows = step.plan.local_length
    wrong = [
        f"{name} has batch {t.shape[0]} and {t.shape[2]} rows, the step has batch 1 and {rows} "
        "rows a rank (pass the local shard that shard_batch made)"
        for name, t in {"query": query, "key": key, "value": value}.items()
        if (t.shape[0], t.shape[2]) != (1, rows)
    ]
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads != value.shape[1]:
        wrong.append(f"{kv_heads} key heads but {value.shape[1]} value heads")
    if heads % kv_heads:
        wrong.append(f"{kv_heads} K/V heads do not divide {heads} query heads")
    elif heads != kv_heads and not enable_gqa:
        wrong.append(f"{heads} query heads share {kv_heads} K/V heads; pass enable_gqa=True")
    if query.shape[3] != key.shape[3]:
        wrong.append(f"query head size {query.shape[3]} but key head size {key.shape[3]}")
    return wrong
