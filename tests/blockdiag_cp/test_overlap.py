"""The exchange behind attention: exact in any number of stages, the same bits hidden or not."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from tests.blockdiag_cp.split_rows import oracle, run_rank, run_ranks, whole_tensors

from longpack import CpStep, PackedRow, cp_blockdiag_sdpa, plan_step
from longpack.blockdiag_cp import overlap
from longpack.collectives import Delayed, Loopback, as_transport
from longpack.errors import StepError
from longpack.kernels.impl import flash_cpu
from longpack.plan import EXCHANGES, LAYOUTS
from longpack.testing import DANGEROUS_ROWS

LONG = PackedRow.from_lengths([40, 7, 1, 90, 30])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*DANGEROUS_ROWS, "long"])
def test_any_number_of_stages_equals_the_oracle(name, layout):
    row = DANGEROUS_ROWS.get(name, LONG)
    tensors = whole_tensors(row, head_dim=8, v_head_dim=6)
    expected = oracle(row, *tensors)
    for world_size, exchange, stages in itertools.product((1, 3, 4), EXCHANGES, (2, 5)):
        plan = plan_step(row, world_size, layout, exchange)
        found = run_ranks(plan, tensors, stages=stages)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_or_not_the_bits_are_the_same(layout, exchange, dtype):
    tensors = whole_tensors(LONG, dtype)
    plan = plan_step(LONG, 4, layout, exchange)
    for stages in (1, 3):
        on, off = (run_ranks(plan, tensors, overlap=o, stages=stages) for o in (True, False))
        assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_exchanges_give_the_same_bits(layout):
    tensors = whole_tensors(LONG, torch.bfloat16)
    first, *others = (run_ranks(plan_step(LONG, 3, layout, e), tensors) for e in EXCHANGES)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def check_gloo(rank, world_size):
    import torch.distributed as dist

    transport = as_transport(dist.group.WORLD)
    tensors = whole_tensors(LONG)
    expected = oracle(LONG, *tensors)
    for layout, exchange, stages, hide in itertools.product(
        LAYOUTS, EXCHANGES, (1, 3), (True, False)
    ):
        plan = plan_step(LONG, world_size, layout, exchange)
        found = run_rank(transport, plan, tensors, stages=stages, overlap=hide)
        rows = torch.from_numpy(plan.shards.rows(rank))
        for ours, whole in zip(found, expected, strict=True):
            theirs = F.pad(whole, (0, 0, 0, plan.padded_length - LONG.length))[:, :, rows]
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [2, 4])
def test_gloo_in_stages_equals_the_oracle(on_ranks, world_size):
    on_ranks(check_gloo, world_size=world_size)


class Noted:
    """A pending exchange that says when it is waited for."""

    def __init__(self, pending, events):
        self.pending, self.events = pending, events

    def wait(self):
        self.events.append("wait")
        return self.pending.wait()


class Journal:
    """A transport's and a kernel's events of one rank, in order."""

    def __init__(self, transport):
        self.rank, self.world_size, self.group = (
            transport.rank,
            transport.world_size,
            transport.group,
        )
        self.transport, self.events = transport, []

    def start_all_to_all(self, *args):
        self.events.append("start")
        pending = self.transport.start_all_to_all(*args)

        return Noted(pending, self.events)

    def forward_tiles(self, tiles, *args):
        self.events.append("arrived tiles" if all(t.continues for t in tiles) else "own tiles")
        flash_cpu.forward_tiles(tiles, *args)

    def backward_tiles(self, tiles, *args, fresh_keys=False):
        self.events.append("own tiles" if fresh_keys else "arrived tiles")
        flash_cpu.backward_tiles(tiles, *args, fresh_keys=fresh_keys)

    lse_dtype = staticmethod(flash_cpu.lse_dtype)


def journal(hide, stages):
    plan = plan_step(PackedRow.from_lengths([4, 20]), 2, "contiguous", "a2a")
    query, key, value, grad = (t[0].transpose(0, 1) for t in whole_tensors(plan.row))

    def body(t):
        noted = Journal(t)
        device = torch.device("cpu")
        staged = overlap.StagedAttention.make(plan, noted, device, hide, stages)
        mine = slice(12 * t.rank, 12 * t.rank + 12)
        q, k, v = query[mine], key[mine], value[mine]
        out, lse, arrived = staged.forward(noted, q, k, v, 1.0)
        noted.events.append("backward")
        staged.backward(noted, grad[mine], q, k, v, out, lse, arrived, 1.0)
        return noted.events

    return Loopback(2).run(body)[1]  # the rank that receives


def test_own_rows_are_attended_while_others_travel():
    assert journal(True, 1) == [
        *("start", "own tiles", "wait", "arrived tiles"),
        *("backward", "arrived tiles", "start", "own tiles", "wait"),
    ]
    assert journal(True, 2) == [
        *("start", "start", "own tiles", "wait", "arrived tiles", "wait", "arrived tiles"),
        *("backward", "arrived tiles", "start", "arrived tiles", "start"),
        *("own tiles", "wait", "wait"),
    ]


def test_without_overlap_arrivals_are_waited_for_first():
    assert journal(False, 1) == [
        *("start", "wait", "own tiles", "arrived tiles"),
        *("backward", "arrived tiles", "start", "wait", "own tiles"),
    ]


def test_a_slow_link_is_hidden_behind_own_rows():
    """With a clock of its own: attention of own rows takes 3 s, the link 2 s."""
    plan = plan_step(PackedRow.from_lengths([4, 20]), 2, "contiguous", "a2a")
    tensors = whole_tensors(plan.row)

    def exposed(hide):
        def body(t):
            now = [0.0]

            def sleep(seconds):
                now[0] += seconds

            link = Delayed(t, 2.0, clock=lambda: now[0], sleep=sleep)
            staged = overlap.StagedAttention.make(plan, link, torch.device("cpu"), hide, 1)

            class Slow:
                lse_dtype = staticmethod(flash_cpu.lse_dtype)

                def forward_tiles(self, tiles, *args):
                    flash_cpu.forward_tiles(tiles, *args)
                    now[0] += 3.0

                def backward_tiles(self, tiles, *args, **kwargs):
                    flash_cpu.backward_tiles(tiles, *args, **kwargs)
                    now[0] += 3.0

            mine = slice(12 * t.rank, 12 * t.rank + 12)
            q, k, v, grad = (x[0].transpose(0, 1)[mine] for x in tensors)
            out, lse, arrived = staged.forward(Slow(), q, k, v, 1.0)
            staged.backward(Slow(), grad, q, k, v, out, lse, arrived, 1.0)
            return link.exposed_s

        return Loopback(2).run(body)

    assert exposed(True) == [0.0, 0.0]
    assert exposed(False) == [4.0, 4.0]


def test_gradients_summed_before_they_travel_are_not_rounded_for_it():
    """zigzag: two segments of a rank read each arrival; error against fp64, by what travels."""
    row = PackedRow.from_lengths([512])
    tensors = whole_tensors(row, torch.bfloat16, 16, 16)
    exact = oracle(row, *tensors)
    plan = plan_step(row, 4, "zigzag", "a2a")

    def error(wide):
        def body(t):
            step = CpStep.make(plan, t)
            assert step.staged.route.wide
            object.__setattr__(step.staged.route, "wide", wide)
            mine = torch.from_numpy(plan.shards.rows(t.rank))
            *leaves, grad = (x[:, :, mine] for x in tensors)
            leaves = [x.clone().requires_grad_() for x in leaves]
            out = cp_blockdiag_sdpa(*leaves, enable_gqa=True, step=step)
            return torch.autograd.grad(out, leaves[1:], grad)

        ranks = Loopback(4).run(body)
        order = torch.cat([torch.from_numpy(plan.shards.rows(r)) for r in range(4)]).argsort()
        key, value = (torch.cat(x, dim=2)[:, :, order] for x in zip(*ranks, strict=True))
        return [
            (x.double() - y).square().mean().sqrt().item() / y.square().mean().sqrt().item()
            for x, y in ((key, exact[2]), (value, exact[3]))
        ]

    kept, rounded = error(True), error(False)
    print("relative error of dk, dv: summed in fp32", kept, "rounded on the way", rounded)
    assert all(a <= b for a, b in zip(kept, rounded, strict=True))


def test_stages_below_one_are_refused():
    with pytest.raises(StepError, match="stages=0"):
        CpStep.make(plan_step(LONG, 1), as_transport(None), stages=0)
