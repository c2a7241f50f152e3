"""Carry the step of an open `with` block from the forward to the checkpoint recompute."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from longpack.blockdiag_cp import state
from longpack.blockdiag_cp.step import CpStep
from longpack.errors import StepError
from longpack.recompute_replay import Carry, CarryState, is_recomputing


@dataclass(frozen=True)
class _Carried:
    """What was active where the checkpointed call began: a step, or none."""

    step: CpStep | None


# Set by the recompute context alone, so what it holds is right for the block that runs inside.
_CARRIED: ContextVar[_Carried | None] = ContextVar("longpack_carried_step", default=None)


def carry_step() -> Carry:
    """Return the part of a checkpoint's `context_fn` that carries the open step.

    For models that call attention without passing the step:

        with sharded.step:
            out = checkpoint(block, x, use_reentrant=False, context_fn=compose(carry_step()))

    Each checkpointed call keeps the step that was open when it ran forward, however many are
    outstanding, when the `with` block has closed, and on whichever thread recomputes.
    """
    return CarryState(lambda: _Carried(resolve_step(None)), _enter)


def resolve_step(step: CpStep | None) -> CpStep | None:
    """Return the given step, else the carried one, else that of the open `with` block, else None.

    Raises:
        StepError: in a checkpoint recompute with no step given or carried. What the shared slot
            holds by then may belong to another microbatch.
    """
    if step is not None:
        return step
    carried = _CARRIED.get()
    if carried is not None:
        return carried.step
    if not is_recomputing():
        return state._CP_BLOCKDIAG_STATE.get()
    raise StepError(
        "attention runs in a checkpoint recompute without its step: the block took the step from "
        "a `with` block, which by now is closed or may belong to another microbatch. Pass step= "
        "to cp_blockdiag_sdpa (cp_step= to a Hugging Face model), which the checkpoint keeps, or "
        "checkpoint with use_reentrant=False and context_fn=compose(carry_step())"
    )


@contextmanager
def _enter(carried: _Carried) -> Iterator[None]:
    token = _CARRIED.set(carried)
    try:
        yield
    finally:
        _CARRIED.reset(token)
