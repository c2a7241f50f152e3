"""One rank loses its log: ranks that agree all decide again, and their collectives stay paired."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from longpack.recompute_replay import AgreeOnMiss, RecomputeReplay, RecomputeReplayRecorder


def any_rank(missing: bool) -> bool:
    vote = torch.tensor(int(missing))
    dist.all_reduce(vote, dist.ReduceOp.MAX)
    return bool(vote)


def train(rank: int, world_size: int, loser: int | None) -> tuple[list[float], int]:
    channel: RecomputeReplay[float] = RecomputeReplay("scale", on_miss=AgreeOnMiss(any_rank))
    made = []

    def total() -> float:
        made.append(1)
        value = torch.tensor(float(rank + 1))
        dist.all_reduce(value)  # of the same shape as the gradient that follows
        return float(value)

    def lose(recorder: RecomputeReplayRecorder[Any]) -> None:
        if rank == loser:
            recorder._records.clear()

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * channel.decide(total, site="total", collective=True)).exp()

    x = torch.linspace(0, 1, 3, dtype=torch.float64).requires_grad_()
    context_fn = channel.checkpoint_context_fn(None, lose)
    out = checkpoint(block, x, use_reentrant=False, context_fn=context_fn, early_stop=False)
    (grad,) = torch.autograd.grad(out.sum(), x)
    dist.all_reduce(grad)
    return grad.tolist(), len(made)


def test_ranks_agree_on_a_lost_log(on_ranks) -> None:
    x = torch.linspace(0, 1, 3, dtype=torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad((x.sin() * 3.0).exp().sum() * 2, x)
    for loser, decisions in ((None, 1), (1, 2)):
        for grad, made in on_ranks(train, loser, world_size=2):
            found = torch.tensor(grad, dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            assert made == decisions
