"""Attention of packed documents over a context-parallel axis.

`longpack.blockdiag_cp.state` is a leaf of the standard library: importing it loads no torch, so
names of this door load on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "ContiguousRows": "contiguous",
    "CpStep": "step",
    "current_blockdiag_cp_state": "step",
    "carry_step": "carry",
    "cp_blockdiag_sdpa": "attention",
    "keep_in_recompute": "keep",
    "ShardLayout": "batch",
    "ShardedBatch": "batch",
    "make_cp_blockdiag_batch_and_ctx": "batch",
    "shard_batch": "batch",
}

__all__ = [
    "ContiguousRows",
    "CpStep",
    "ShardLayout",
    "ShardedBatch",
    "carry_step",
    "cp_blockdiag_sdpa",
    "current_blockdiag_cp_state",
    "keep_in_recompute",
    "make_cp_blockdiag_batch_and_ctx",
    "shard_batch",
]

if TYPE_CHECKING:
    from longpack.blockdiag_cp.attention import cp_blockdiag_sdpa
    from longpack.blockdiag_cp.batch import (
        ShardedBatch,
        ShardLayout,
        make_cp_blockdiag_batch_and_ctx,
        shard_batch,
    )
    from longpack.blockdiag_cp.carry import carry_step
    from longpack.blockdiag_cp.contiguous import ContiguousRows
    from longpack.blockdiag_cp.keep import keep_in_recompute
    from longpack.blockdiag_cp.step import CpStep, current_blockdiag_cp_state


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'longpack.blockdiag_cp' has no attribute {name!r}")
    return getattr(importlib.import_module(f"longpack.blockdiag_cp.{_HOME[name]}"), name)
