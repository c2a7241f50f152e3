"""Those who watch a model hear of every attention call."""

from concurrent.futures import ThreadPoolExecutor

import torch

from longpack import CpStep, PackedRow, cp_blockdiag_sdpa, plan_step
from longpack.blockdiag_cp.observe import observe_attention
from longpack.collectives import Loopback, as_transport


def test_calls_on_autograds_own_thread_are_heard():
    """A device's backward runs there, where a context variable of this thread is unset."""
    heard = []
    step = CpStep.make(plan_step(PackedRow.from_lengths([3, 5]), 1), as_transport(None))
    x = torch.randn(1, 2, 8, 4)
    with observe_attention(heard.append), ThreadPoolExecutor(1) as other:
        cp_blockdiag_sdpa(x, x, x, step=step)
        other.submit(cp_blockdiag_sdpa, x, x, x, step=step).result()
    cp_blockdiag_sdpa(x, x, x, step=step)
    assert heard == ["flash_cpu"] * 2


def test_ranks_that_are_threads_hear_their_own_calls_alone():
    plan = plan_step(PackedRow.from_lengths([3, 5]), 2)

    def body(t):
        heard, step = [], CpStep.make(plan, t)
        x = torch.randn(1, 2, 4, 4)
        with observe_attention(heard.append):
            for _ in range(2):
                cp_blockdiag_sdpa(x, x, x, step=step)
            t.all_gather_object(None)
        return heard

    assert Loopback(2).run(body) == [["flash_cpu"] * 2] * 2
