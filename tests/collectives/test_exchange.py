"""Exchanges: forward delivers the planned rows, backward is the transpose and adds."""

import pytest
import torch

from longpack import CpStep, PackedRow, plan_step
from longpack.collectives import Loopback, as_transport, exchange_rows, gather_rows
from longpack.errors import CollectiveError
from longpack.plan import EXCHANGES, LAYOUTS
from longpack.testing import DANGEROUS_ROWS

ROWS = [pytest.param(row, id=name) for name, row in DANGEROUS_ROWS.items()]


def needed_rows(plan, rank):
    ids = torch.zeros(plan.padded_length).long()
    ids[: plan.row.length] = torch.from_numpy(plan.row.doc_ids())
    spans = [
        (start, max(q for q in plan.shards.rows(rank) if start <= q < stop) + 1)
        for start, stop in plan.row.documents
        if any(start <= q < stop for q in plan.shards.rows(rank))
    ]
    return torch.tensor([r for a, b in spans for r in range(a, b)], dtype=torch.long)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_backward_is_the_transpose(row, layout, exchange, world_size):
    """As matrices: forward of all ranks is A, and its backward is the transpose of A."""
    plan = plan_step(row, world_size, layout, exchange)
    whole = torch.randn(plan.padded_length, 3, dtype=torch.float64)
    needed = [needed_rows(plan, r) for r in range(world_size)]
    grads = [torch.randn(len(n), 3, dtype=torch.float64) for n in needed]

    def body(t):
        x = whole[torch.from_numpy(plan.shards.rows(t.rank))].requires_grad_()
        out = exchange_rows(x, t, CpStep.make(plan, t).route)
        assert torch.equal(out, whole[needed[t.rank]])
        return torch.autograd.grad(out, x, grads[t.rank])[0]

    expected = torch.zeros_like(whole)
    for rows, grad in zip(needed, grads, strict=True):
        expected.index_add_(0, rows, grad)
    for rank, ours in enumerate(Loopback(world_size).run(body)):
        theirs = expected[torch.from_numpy(plan.shards.rows(rank))]
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


def check_gloo(rank, world_size, dtype):
    import torch.distributed as dist

    transport = as_transport(dist.group.WORLD)
    for row in DANGEROUS_ROWS.values():
        for exchange in EXCHANGES:
            plan = plan_step(row, world_size, kv_exchange=exchange)
            whole = torch.arange(plan.padded_length, dtype=dtype)[:, None]
            x = whole[torch.from_numpy(plan.shards.rows(rank))].requires_grad_()
            out = exchange_rows(x, transport, CpStep.make(plan, transport).route)
            assert torch.equal(out, whole[needed_rows(plan, rank)])
            (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
            everyone = torch.cat([needed_rows(plan, r) for r in range(world_size)])
            readers = torch.bincount(everyone, minlength=plan.padded_length)
            assert torch.equal(grad[:, 0].long(), readers[plan.shards.rows(rank)])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gloo_delivers_and_adds(on_ranks, dtype, world_size):
    on_ranks(check_gloo, dtype, world_size=world_size)


def test_low_precision_gradients_are_added_in_fp32():
    """256 + 1 is 256 in bf16: eight readers of one row add to 264 only in fp32."""
    row = PackedRow.from_lengths([9])
    for exchange in EXCHANGES[::2]:
        plan = plan_step(row, 9, kv_exchange=exchange)

        def body(t, plan=plan):
            x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
            out = exchange_rows(x, t, CpStep.make(plan, t).route)
            grad = torch.ones_like(out)
            grad[0] = 256.0 if t.rank == 0 else 1.0
            return torch.autograd.grad(out, x, grad)[0].item()

        assert Loopback(9).run(body)[0] == 264.0


def test_gather_rows_sums_gradients():
    def body(t):
        x = torch.full((2, 1), float(t.rank), requires_grad=True)
        whole = gather_rows(x, t)
        assert whole[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        return torch.autograd.grad(whole, x, torch.arange(6.0)[:, None] * (t.rank + 1))[0]

    grads = Loopback(3).run(body)
    assert [g[:, 0].tolist() for g in grads] == [[0.0, 6.0], [12.0, 18.0], [24.0, 30.0]]


def test_ranks_that_meet_in_different_operations_are_told():
    def body(t):
        x = torch.zeros(2, 1)
        return t.all_gather(x) if t.rank else t.all_to_all(x, (1, 1), (1, 1))

    with pytest.raises(CollectiveError, match="rank 0 all_to_all, rank 1 all_gather"):
        Loopback(2).run(body)


def test_a_rank_that_never_arrives_ends_the_others():
    def body(t):
        return t.all_gather(torch.zeros(1)) if t.rank else None

    with pytest.raises(
        CollectiveError,
        match=r"rank 1 of 2 \(cp\): all_gather failed .* waiting for rank 0: it ended",
    ):
        Loopback(2, timeout_s=0.2).run(body)


def check_meshes(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    assert as_transport(mesh["cp"]).world_size == 2
    assert as_transport(mesh["cp"].get_group()).rank == rank % 2
    with pytest.raises(CollectiveError, match="2 dimensions"):
        as_transport(mesh)


def test_an_axis_is_a_one_dimensional_mesh(on_ranks):
    on_ranks(check_meshes, world_size=4)
    with pytest.raises(CollectiveError, match="got int"):
        as_transport(2)


def check_late_peer(rank, world_size):
    """Rank 1 stays away: rank 0's own error says who failed, where and for how long."""
    import datetime
    import time

    import torch.distributed as dist

    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    if rank == 1:
        time.sleep(4)
        return ""
    try:
        as_transport(group).all_gather(torch.zeros(3, 2))
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_a_peer_that_stays_away_is_an_error_within_the_timeout(on_ranks):
    said, _ = on_ranks(check_late_peer, world_size=2)
    assert "rank 0 of 2 (cp): all_gather of (3, 2) float32 failed after 2" in said
