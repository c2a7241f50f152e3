"""What a checkpointed block keeps of its attention, so that the recompute does less again."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch.utils.checkpoint import create_selective_checkpoint_contexts

from longpack.blockdiag_cp.kept import KeptScope, Rows
from longpack.blockdiag_cp.operator import attend
from longpack.recompute_replay.contexts import CheckpointContextFn

KEPT = ("nothing", "kv", "attention")


def keep_in_recompute(what: str) -> CheckpointContextFn:
    """Return a `context_fn` for `torch.utils.checkpoint` that keeps part of attention.

        checkpoint(block, x, step, use_reentrant=False, context_fn=keep_in_recompute("kv"))
        model.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": keep_in_recompute("attention")}
        )

    Of each attention call in the block, with local queries `[n, H, D]` and R rows of K and V that
    arrive, the recompute repeats and the block keeps until its backward:

    | `what` | repeated | kept, in numbers |
    |---|---|---|
    | `nothing` | exchange and attention | nothing |
    | `kv` | attention | R * Hkv * (D + Dv) |
    | `attention` | neither | R * Hkv * (D + Dv) + n * H * (Dv + 1) |

    The projections that make query, key and value are repeated in each. Compose it with other
    parts by `longpack.recompute_replay.compose`. Every rank keeps the same. It acts on kernels that
    attend in parts, `flash_cpu` and `flash_torch_cuda`; others repeat everything.

    Args:
        what: one of `KEPT`.

    Raises:
        ValueError: another word.
    """
    if what not in KEPT:
        raise ValueError(f"what={what!r} cannot be kept; it is one of {', '.join(KEPT)}")
    if what == "nothing":
        return _nothing
    if what == "kv":
        return _kv
    return partial(create_selective_checkpoint_contexts, [attend._opoverload])


def _nothing() -> tuple[AbstractContextManager, AbstractContextManager]:
    return nullcontext(), nullcontext()


def _kv() -> tuple[AbstractContextManager, AbstractContextManager]:
    rows: Rows = []
    return KeptScope(rows, replays=False), KeptScope(rows, replays=True)
