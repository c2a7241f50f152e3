"""The contiguous view: consecutive rows, exactly, and back; its backward is the way back."""

import numpy as np
import pytest
import torch

from longpack import CpStep, PackedRow, plan_step
from longpack.blockdiag_cp.contiguous import ContiguousRows
from longpack.collectives import Loopback, as_transport
from longpack.errors import PlanError, StepError
from longpack.plan import LAYOUTS
from longpack.plan.relayout import relayout
from longpack.testing import DANGEROUS_ROWS

ROWS = [pytest.param(row, id=name) for name, row in DANGEROUS_ROWS.items()]


def check_rank(transport, plan):
    """In and back is the identity; the middle is rows [r*n, (r+1)*n); gradients go home."""
    view = ContiguousRows.of(CpStep.make(plan, transport))
    n, rank = plan.local_length, transport.rank
    rows = torch.from_numpy(plan.shards.rows(rank)).double()
    x = torch.stack([rows, -rows], dim=1)[None].requires_grad_()  # [1, n, 2]
    middle = view.enter(x)
    consecutive = torch.arange(rank * n, (rank + 1) * n, dtype=torch.float64)
    assert torch.equal(middle, torch.stack([consecutive, -consecutive], dim=1)[None])
    weight = consecutive[None, :, None] + 1  # a gradient that names its row
    back = view.leave(middle * weight)
    assert torch.equal(back, x * (rows[None, :, None] + 1))
    [grad] = torch.autograd.grad(back.sum(), x)
    assert torch.equal(grad, (rows[None, :, None] + 1).expand_as(x))
    return view.inward.kind


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_there_and_back(row, layout, world_size):
    plan = plan_step(row, world_size, layout)
    kinds = Loopback(world_size).run(lambda t: check_rank(t, plan))
    if layout == "contiguous" or world_size == 1:
        assert set(kinds) == {"none"}


def check_gloo(rank, world_size):
    import torch.distributed as dist

    check_rank(as_transport(dist.group.WORLD), plan_step(ROWS[0].values[0], world_size, "zigzag"))


def test_over_gloo(on_ranks):
    on_ranks(check_gloo, world_size=2)


def test_only_rows_that_change_ranks_move():
    row = PackedRow.from_lengths([16])
    source, target = (plan_step(row, 2, name).shards for name in ("head_tail", "contiguous"))
    parts = [relayout(source, target, rank) for rank in (0, 1)]
    assert [part.send_counts for part in parts] == [(0, 4), (4, 0)]
    np.testing.assert_array_equal(parts[0].send_rows, [4, 5, 6, 7])  # rows 12 to 15
    np.testing.assert_array_equal(parts[0].key_rows, [0, 1, 2, 3, 8, 9, 10, 11])


def test_what_does_not_fit_is_named():
    row = PackedRow.from_lengths([16])
    view = ContiguousRows.of(CpStep.make(plan_step(row, 1), as_transport(None)))
    with pytest.raises(StepError, match="x has 4 rows along dim=1, a shard has 16"):
        view.enter(torch.zeros(1, 4))
    with pytest.raises(PlanError, match="16 rows on 2 ranks cannot become one of 16 rows on 4"):
        relayout(plan_step(row, 2).shards, plan_step(row, 4).shards, 0)
