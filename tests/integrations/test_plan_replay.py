"""A plan made inside a checkpointed block, preflight and all, is made once and replayed."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from longpack import CpStep, PackedRow, RecomputeReplay, cp_blockdiag_sdpa, plan_step
from longpack.blockdiag_cp.agreement import agree_on_plan
from longpack.collectives import Loopback
from longpack.errors import ReplayError
from longpack.recompute_replay import compose

ROW = PackedRow.from_lengths([3, 5])


class Block:
    """Attention whose step is planned, and agreed over the ranks, where it is needed."""

    def __init__(self, transport, channel):
        self.transport, self.channel, self.plans_made = transport, channel, 0

    def make_step(self):
        self.plans_made += 1
        plan = agree_on_plan(lambda: plan_step(ROW, 2, kv_exchange="a2a"), self.transport, True)
        return CpStep.make(plan, self.transport)

    def __call__(self, x):
        step = self.channel.decide(self.make_step, site="cp plan", collective=True)
        return cp_blockdiag_sdpa(x, x * 0.5, x + 1.0, step=step)


def test_the_recompute_neither_plans_nor_votes_again():
    torch.manual_seed(0)
    whole = torch.randn(1, 2, 8, 4, dtype=torch.float64)

    def gradient(transport, checkpointed):
        channel = RecomputeReplay("cp plan")
        block = Block(transport, channel)
        mine = whole[:, :, transport.rank * 4 :][:, :, :4].clone().requires_grad_()
        if checkpointed:
            context_fn = compose(channel)
            out = checkpoint(
                block, mine, use_reentrant=False, context_fn=context_fn, early_stop=False
            )
        else:
            out = block(mine)
        out.square().sum().backward()
        return mine.grad, block.plans_made

    replayed = Loopback(2).run(lambda t: gradient(t, checkpointed=True))
    plain = Loopback(2).run(lambda t: gradient(t, checkpointed=False))
    for (ours, plans_made), (theirs, _) in zip(replayed, plain, strict=True):
        assert torch.equal(ours, theirs)
        assert plans_made == 1


def test_a_plan_that_was_not_recorded_is_an_error_on_no_rank_alone():
    """The vote is a collective: a rank that voted again by itself would meet another one."""
    channel = RecomputeReplay("cp plan")
    block = Block(Loopback(1).transport(0), channel)
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    out = checkpoint(lambda x: block(x) if torch.is_grad_enabled() else x, x, use_reentrant=True)
    with pytest.raises(ReplayError, match="not bound to"):
        out.sum().backward()
