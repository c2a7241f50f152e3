"""longpack: context parallelism for packed documents, and replay of forward decisions.

The front door. Names load on first use, so that `import longpack` loads no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "PackedRow": "packing",
    "plan_step": "plan",
    "Plan": "plan",
    "configure_cp_varlen": "blockdiag_cp.state",
    "cp_varlen_runtime_config": "blockdiag_cp.state",
    "CpStep": "blockdiag_cp",
    "ShardedBatch": "blockdiag_cp",
    "carry_step": "blockdiag_cp",
    "cp_blockdiag_sdpa": "blockdiag_cp",
    "current_blockdiag_cp_state": "blockdiag_cp",
    "make_cp_blockdiag_batch_and_ctx": "blockdiag_cp",
    "shard_batch": "blockdiag_cp",
    "RecomputeReplay": "recompute_replay",
    "RecomputeReplayRecorder": "recompute_replay",
    "LongpackError": "errors",
}

__all__ = [
    "CpStep",
    "LongpackError",
    "PackedRow",
    "Plan",
    "RecomputeReplay",
    "RecomputeReplayRecorder",
    "ShardedBatch",
    "carry_step",
    "configure_cp_varlen",
    "cp_blockdiag_sdpa",
    "cp_varlen_runtime_config",
    "current_blockdiag_cp_state",
    "make_cp_blockdiag_batch_and_ctx",
    "plan_step",
    "shard_batch",
]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from longpack.blockdiag_cp import (
        CpStep,
        ShardedBatch,
        carry_step,
        cp_blockdiag_sdpa,
        current_blockdiag_cp_state,
        make_cp_blockdiag_batch_and_ctx,
        shard_batch,
    )
    from longpack.blockdiag_cp.state import configure_cp_varlen, cp_varlen_runtime_config
    from longpack.errors import LongpackError
    from longpack.packing import PackedRow
    from longpack.plan import Plan, plan_step
    from longpack.recompute_replay import RecomputeReplay, RecomputeReplayRecorder


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'longpack' has no attribute {name!r}; it has {__all__}")
    return getattr(importlib.import_module(f"longpack.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
