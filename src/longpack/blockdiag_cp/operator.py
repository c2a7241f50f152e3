"""Attention of a step as one operator, `longpack::attend`: compilers do not break at it, and
checkpoint policies can name it.

Operators take tensors and numbers. A step goes in as a `token`: a tensor whose value names the
step's `StagedAttention` and whose length says how many rows arrive, so that shapes are known while
tracing. The token holds what it names, and whatever holds the token, as a checkpoint or a
compiled graph does, keeps it alive.
"""

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from longpack.blockdiag_cp import state
from longpack.blockdiag_cp.kept import CURSOR
from longpack.blockdiag_cp.overlap import StagedAttention
from longpack.errors import StepError
from longpack.kernels import TILED
from longpack.recompute_replay import is_recomputing

_NUMBERS = itertools.count()
_ALIVE: "WeakValueDictionary[int, StagedAttention]" = WeakValueDictionary()


def name_call(layer: int, step_name: str) -> str:
    """Return what messages call an attention call, layer -1 being one that nobody named."""
    return step_name if layer < 0 else f"layer {layer} of {step_name}"


def make_token(staged: StagedAttention) -> Tensor:
    """Return a token of one rank's part of a step, int64 `[received + 1]` on the host."""
    number = next(_NUMBERS)
    _ALIVE[number] = staged
    token = torch.tensor(number).expand(staged.route.received + 1)
    token.staged = staged  # pyright: ignore[reportAttributeAccessIssue]
    return token


def _staged(token: Tensor) -> StagedAttention:
    staged = _ALIVE.get(int(token[0]))
    if staged is None:
        raise StepError(
            "attention runs after its step is gone: keep the sharded batch until backward is done"
        )
    return staged


@torch.library.custom_op("longpack::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    token: Tensor,
    kernel: str,
    scale: float,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend as `StagedAttention.forward`; exchange nothing where a checkpoint kept K and V.

    `layer` is for messages, -1 where nobody said.
    """
    # counted when it runs: counted while tracing, it would be traced anew at every count
    state._CP_ATTN_FIRE_COUNT[0] += 1
    staged, cursor = _staged(token), CURSOR.get()
    phase = "recompute" if is_recomputing() else "forward"
    staged.transport.enter(f"{name_call(layer, staged.name)}, {phase}")
    kept = None if cursor is None else cursor.take(staged)
    out, lse, arrived = staged.forward(TILED[kernel], query, key, value, scale, kept)
    if cursor is not None:
        cursor.put(staged, arrived)
    return out, lse, arrived


@attend.register_fake
def _(query, key, value, token, kernel, scale, layer):
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    lse = query.new_empty(query.shape[:2], dtype=TILED[kernel].lse_dtype(query.dtype))
    arrived = (token.shape[0] - 1, key.shape[1], key.shape[2] + value.shape[2])
    return out, lse, key.new_empty(arrived)


@torch.library.custom_op("longpack::attend_backward", mutates_args=())
def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    arrived: Tensor,
    token: Tensor,
    kernel: str,
    scale: float,
    layer: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of query, and of key and value side by side."""
    staged = _staged(token)
    staged.transport.enter(f"{name_call(layer, staged.name)}, backward")
    return staged.backward(TILED[kernel], grad_out, query, key, value, out, lse, arrived, scale)


@attend_backward.register_fake
def _(grad_out, query, key, value, out, lse, arrived, token, kernel, scale, layer):
    rows = key.new_empty((*key.shape[:2], key.shape[2] + value.shape[2]))
    return query.new_empty(query.shape), rows


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, token, *ctx.numbers = inputs
    out, lse, arrived = output
    ctx.save_for_backward(query, key, value, out, lse, arrived, token)
    ctx.mark_non_differentiable(lse, arrived)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 7
    *saved, token = ctx.saved_tensors
    grad_query, rows = torch.ops.longpack.attend_backward(grad_out, *saved, token, *ctx.numbers)
    grad_key, grad_value = rows.split([saved[1].shape[2], saved[2].shape[2]], dim=2)
    return grad_query, grad_key, grad_value, None, None, None, None


attend.register_autograd(_backward, setup_context=_setup_context)
