"""Contiguous rows for layers that need them, whatever the layout of the step."""

from dataclasses import dataclass
from typing import Self

import torch

from longpack.blockdiag_cp.step import CpStep
from longpack.collectives import Route, exchange_rows
from longpack.errors import StepError
from longpack.plan import Shards
from longpack.plan.layouts import contiguous
from longpack.plan.relayout import relayout


@dataclass(frozen=True, eq=False)
class ContiguousRows:
    """The way from a step's rows to consecutive ones and back: one all-to-all each, differentiable.

    A recurrent layer takes `view.enter(x)`, where rank r holds rows [r * n, (r + 1) * n) of the
    padded row, resets its state at `step.packed_cu_seqlens`, hands its last state to the next
    rank, and gives back `view.leave(y)`. Make it once a step; nothing moves where the step's
    layout is contiguous already.

    Args:
        step: the step.
        inward, outward: this rank's part of the two exchanges.
    """

    step: CpStep
    inward: Route
    outward: Route

    @classmethod
    def of(cls, step: CpStep) -> Self:
        """Plan both exchanges for this rank; no rank waits for another."""
        plan = step.plan
        target = contiguous(plan.row.pad_to(plan.padded_length), plan.world_size)
        return cls(step, _route(plan.shards, target, step), _route(target, plan.shards, step))

    def enter(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's consecutive rows of `x`, whose `dim` counts the step's local rows.

        Every rank calls it. Its backward is `leave`.
        """
        return self._exchange(x, dim, self.inward)

    def leave(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return the step's local rows of `x`, whose `dim` counts consecutive rows."""
        return self._exchange(x, dim, self.outward)

    def _exchange(self, x: torch.Tensor, dim: int, route: Route) -> torch.Tensor:
        if x.shape[dim] != route.num_keys:
            raise StepError(
                f"x has {x.shape[dim]} rows along dim={dim}, a shard has {route.num_keys}: pass "
                "this rank's local rows and their dim"
            )
        return exchange_rows(x.movedim(dim, 0), self.step.transport, route).movedim(0, dim)


def _route(source: Shards, target: Shards, step: CpStep) -> Route:
    part = relayout(source, target, step.rank)
    same = source.start.tolist() == target.start.tolist() and (
        source.owner.tolist() == target.owner.tolist()
    )
    return Route(
        kind="none" if same else "a2a",
        send_index=torch.from_numpy(part.send_rows).to(step.device),
        send_counts=part.send_counts,
        receive_counts=part.receive_counts,
        key_index=None if same else torch.from_numpy(part.key_rows).to(step.device),
        num_keys=source.local_length,
    )
