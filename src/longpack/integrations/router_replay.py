"""Replay the expert choices of MoE routers in the checkpoint recompute.

Works for every router that chooses with `torch.topk` inside a module of its own: Mixtral, Qwen-MoE,
DeepSeek-V3, gpt-oss, Llama 4 and their like.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from longpack.integrations.wrapping import Forward, Wrapped, find_sites, wrap_forwards
from longpack.recompute_replay import IdCodec, RecomputeReplay

_TOPK = (torch.topk, torch.Tensor.topk)


def replay_routers(
    model: nn.Module,
    channel: RecomputeReplay[torch.Tensor],
    is_router: Callable[[nn.Module], bool] | None = None,
) -> Wrapped:
    """Make the routers of `model` choose in forward and choose the same in the recompute.

    The indices of each `topk` inside a router are recorded, one byte or two each; its values are
    gathered from the scores of the moment, so that gradients reach the router as before. Bind the
    channel with `context_fn=compose(channel)`.

    Arguments:
        model: holds the routers; the names in it become sites, so `channel.verify` names a layer.
        channel: records the choices.
        is_router: finds routers; default by class name, which ends in "Router".

    Raises:
        UnsupportedError: where the model has no router.
    """
    sites = find_sites(model, "Router", is_router)
    return wrap_forwards(
        model, sites, lambda site, forward: partial(_route, channel, site, forward)
    )


def _route(
    channel: RecomputeReplay[torch.Tensor], site: str, forward: Forward, *args: Any, **kwargs: Any
) -> Any:
    with _DecideTopK(channel, site):
        return forward(*args, **kwargs)


class _DecideTopK(TorchFunctionMode):
    """Makes every `topk` inside a decision of `channel`."""

    def __init__(self, channel: RecomputeReplay[torch.Tensor], site: str) -> None:
        super().__init__()
        self._channel, self._site = channel, site

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        indices = self._channel.decide(
            lambda: func(*args, **kwargs).indices,
            site=self._site,
            inputs=scores,
            codec=IdCodec(scores.shape[dim]),
        )
        return torch.return_types.topk((scores.gather(dim, indices), indices))
