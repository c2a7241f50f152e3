"""Replay the key choices of sparse-attention indexers in the checkpoint recompute.

An indexer scores every key for every query and keeps the indices of the best, with no gradient:
DeepSeek-V3.2 and GLM-MoE-DSA. A replay skips all of its work.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from longpack.integrations.wrapping import Forward, Wrapped, find_sites, wrap_forwards
from longpack.recompute_replay import RecomputeReplay


def replay_indexers(
    model: nn.Module,
    channel: RecomputeReplay[torch.Tensor],
    is_indexer: Callable[[nn.Module], bool] | None = None,
) -> Wrapped:
    """Make the indexers of `model` choose in forward and hand the choice back in the recompute.

    Top-2,048 for 16,384 queries is 128 MiB a layer as int32: give the channel
    `codec=IdCodec(keys)`, which halves it up to 65,536 keys, or recompute instead.

    Arguments:
        model: holds the indexers; the names in it become sites.
        channel: records the choices. No gradient goes through an indexer.
        is_indexer: finds indexers; default by class name, which ends in "Indexer".

    Raises:
        UnsupportedError: where the model has no indexer.
    """
    sites = find_sites(model, "Indexer", is_indexer)
    return wrap_forwards(
        model, sites, lambda site, forward: partial(_index, channel, site, forward)
    )


def _index(
    channel: RecomputeReplay[torch.Tensor], site: str, forward: Forward, *args: Any, **kwargs: Any
) -> torch.Tensor:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    return channel.decide(lambda: forward(*args, **kwargs), site=site, inputs=tensors)
