"""All ranks of a step as threads of this process, each timed by the clock of its thread."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from longpack.bench.contenders import (
    Attend,
    Problem,
    difference_of_rank,
    longpack_step,
    require_equal,
)
from longpack.bench.memory import kept_bytes
from longpack.bench.timing import THREAD_CLOCKS, clock_call
from longpack.collectives import Loopback, Transport
from longpack.plan import Plan


class ThreadRanks:
    """Every rank's shard and step, ready to run; callers keep torch on one thread meanwhile.

    Args:
        plan: of the whole row.
        problem: tensors of the whole row.
    """

    def __init__(self, plan: Plan, problem: Problem) -> None:
        self.plan, self.meeting = plan, Loopback(plan.world_size)
        self.shards = [problem.shard(plan, rank) for rank in range(plan.world_size)]
        self.attends = [
            longpack_step(plan, self.meeting.transport(rank)) for rank in range(plan.world_size)
        ]

    def run(self) -> list[list[torch.Tensor]]:
        """Return output and gradients of each rank's rows."""
        return self._on_ranks(lambda _, shard, attend: shard.run(attend))

    def clock(self) -> list[dict[str, float]]:
        """Return each rank's milliseconds of one forward and backward, by clock."""
        return self._on_ranks(_clock)

    def kept_bytes(self) -> list[int]:
        """Return what autograd keeps on each rank between forward and backward."""
        return self._on_ranks(lambda _, shard, attend: kept_bytes(shard, attend))

    def difference(self, expected: list[torch.Tensor]) -> float:
        """Return the largest difference of any rank's rows.

        Raises:
            ResultError: a rank's rows are wrong.
        """
        world_size = self.plan.world_size
        return require_equal(
            {
                f"rank {rank} of {world_size}": difference_of_rank(found, expected, self.plan, rank)
                for rank, found in enumerate(self.run())
            }
        )

    def _on_ranks(self, call: Callable[[Transport, Problem, Attend], Any]) -> list[Any]:
        def body(end: Transport) -> Any:
            torch.set_num_threads(1)  # a new thread starts with a number of its own
            return call(end, self.shards[end.rank], self.attends[end.rank])

        return self.meeting.run(body)


def _clock(end: Transport, shard: Problem, attend: Attend) -> dict[str, float]:
    together = partial(end.all_gather_object, None)
    return clock_call(partial(shard.run, attend), THREAD_CLOCKS, start=together)
