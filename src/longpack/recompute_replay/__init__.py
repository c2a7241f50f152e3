"""Record decisions in the forward pass and replay them in the checkpoint recompute.

Activation checkpointing runs a block twice, and what the block decides (routes, top-k choices,
layouts, plans) is decided twice: at a cost, and sometimes differently, which gives wrong gradients
without an error. A channel records the decisions of a forward and hands them back:

    routes = RecomputeReplay("routes")
    checkpoint(block, x, use_reentrant=False, context_fn=compose(routes))
    ids = routes.decide(lambda: scores.topk(2).indices, site="layer 3")   # inside the block
"""

from longpack.recompute_replay.accounting import Usage
from longpack.recompute_replay.carry import (
    Carry,
    CarryContextVars,
    CarryState,
    carry_sdpa_backends,
)
from longpack.recompute_replay.channel import RecomputeReplay
from longpack.recompute_replay.codecs import BitCodec, Codec, IdCodec
from longpack.recompute_replay.compiled import compiled_decision, save_decisions
from longpack.recompute_replay.compose import compose
from longpack.recompute_replay.contexts import CheckpointContextFn, _Binding
from longpack.recompute_replay.miss import AgreeOnMiss, MissPolicy, replay_labels
from longpack.recompute_replay.outside import run_uncounted
from longpack.recompute_replay.phase import is_recomputing, once_per_forward
from longpack.recompute_replay.recorder import RecomputeReplayRecorder, T
from longpack.recompute_replay.verify import Drift, VerifyReport, score_margin

__all__ = [
    "AgreeOnMiss",
    "BitCodec",
    "Carry",
    "CarryContextVars",
    "CarryState",
    "CheckpointContextFn",
    "Codec",
    "Drift",
    "IdCodec",
    "MissPolicy",
    "RecomputeReplay",
    "RecomputeReplayRecorder",
    "T",
    "Usage",
    "VerifyReport",
    "_Binding",
    "carry_sdpa_backends",
    "compiled_decision",
    "compose",
    "is_recomputing",
    "once_per_forward",
    "replay_labels",
    "run_uncounted",
    "save_decisions",
    "score_margin",
]
