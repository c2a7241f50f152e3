"""Exactness: outputs and all gradients against the oracle, over layouts, exchanges, kernels."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from longpack import CpStep, PackedRow, cp_blockdiag_sdpa, plan_step
from longpack.blockdiag_cp import state
from longpack.collectives import Loopback, as_transport
from longpack.errors import StepError, UnsupportedError
from longpack.plan import EXCHANGES, LAYOUTS
from longpack.testing import DANGEROUS_ROWS, packed_rows
from longpack.verify.oracle import oracle_attention

BACKENDS = ("dense", "flash")
ROWS = [pytest.param(row, id=name) for name, row in DANGEROUS_ROWS.items()]
HEADS = 4


def whole_tensors(row, dtype=torch.float64, kv_heads=2, head_dim=8, v_head_dim=6):
    """Query, key, value and output gradient of a whole row, `[1, H, S, D]`, padding included."""
    torch.manual_seed(row.length)
    shapes = [(HEADS, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim), (HEADS, v_head_dim)]
    return [torch.randn(1, h, row.length, d, dtype=dtype) for h, d in shapes]


def oracle(row, query, key, value, grad):
    """Output and gradients of the whole row, `[1, H, S, D]` each."""
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    out = oracle_attention(*leaves, torch.from_numpy(row.doc_ids()))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def local(x, plan, rank):
    """Rows of a rank, padding past the row's end filled with a value that must not matter."""
    padded = F.pad(x, (0, 0, 0, plan.padded_length - plan.row.length), value=3.5)
    return padded[:, :, torch.from_numpy(plan.shards.rows(rank))]


def run_rank(transport, plan, tensors, backend):
    """Output and gradients of one rank's rows."""
    step = CpStep.make(plan, transport, attn_backend=backend)
    *qkv, grad = (local(t, plan, transport.rank) for t in tensors)
    leaves = [t.clone().requires_grad_() for t in qkv]
    out = cp_blockdiag_sdpa(*leaves, enable_gqa=True, step=step)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_matches(plan, ranks, expected, tolerance=1e-12):
    """Each rank's rows equal the oracle's; padding is exactly zero."""
    real = torch.from_numpy(plan.row.doc_ids() > 0)
    for rank, results in enumerate(ranks):
        rows = torch.from_numpy(plan.shards.rows(rank))
        for name, ours, whole in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
            padded = F.pad(whole, (0, 0, 0, plan.padded_length - plan.row.length))
            theirs = padded[:, :, rows]
            scale = whole.abs().max().clamp(min=1.0) if whole.numel() else 1.0
            error = (ours - theirs).abs().max().item() if ours.numel() else 0.0
            assert error <= tolerance * scale, f"{name} on rank {rank}: {error}"
            is_padding = ~F.pad(real, (0, plan.padded_length - plan.row.length))[rows]
            assert (ours[:, :, is_padding] == 0).all(), f"{name}: padding is not zero"


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_loopback_equals_the_oracle(row, world_size):
    tensors = whole_tensors(row)
    expected = oracle(row, *tensors)
    for layout, exchange, backend in itertools.product(LAYOUTS, EXCHANGES, BACKENDS):
        plan = plan_step(row, world_size, layout, exchange)
        ranks = Loopback(world_size).run(lambda t, p=plan, b=backend: run_rank(t, p, tensors, b))
        assert_matches(plan, ranks, expected)


@given(
    packed_rows(max_documents=5, max_tokens=40),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(EXCHANGES),
    st.sampled_from(BACKENDS),
    st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_loopback_equals_the_oracle_on_any_row(row, layout, exchange, backend, world_size):
    tensors = whole_tensors(row)
    plan = plan_step(row, world_size, layout, exchange)
    ranks = Loopback(world_size).run(lambda t: run_rank(t, plan, tensors, backend))
    assert_matches(plan, ranks, oracle(row, *tensors))


def check_gloo(rank, world_size, names):
    import torch.distributed as dist

    transport = as_transport(dist.group.WORLD)
    for name, layout, exchange, backend in itertools.product(names, LAYOUTS, EXCHANGES, BACKENDS):
        row = DANGEROUS_ROWS[name]
        tensors = whole_tensors(row)
        plan = plan_step(row, world_size, layout, exchange)
        results = run_rank(transport, plan, tensors, backend)
        expected = oracle(row, *tensors)
        for ours, whole in zip(results, expected, strict=True):
            theirs = F.pad(whole, (0, 0, 0, plan.padded_length - plan.row.length))
            theirs = theirs[:, :, torch.from_numpy(plan.shards.rows(rank))]
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [2, 4])
def test_gloo_equals_the_oracle(on_ranks, world_size):
    on_ranks(check_gloo, list(DANGEROUS_ROWS), world_size=world_size)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_another_document_changes_nothing(exchange):
    """Boundary: change token 0 of document 1; outputs of document 2 do not move at all."""
    row = PackedRow.from_lengths([5, 3])
    query, key, value, _ = whole_tensors(row)
    plan = plan_step(row, 2, kv_exchange=exchange)

    def outputs():
        def body(t):
            step = CpStep.make(plan, t)
            shards = (local(x, plan, t.rank) for x in (query, key, value))
            return cp_blockdiag_sdpa(*shards, enable_gqa=True, step=step)

        return torch.cat(Loopback(2).run(body), dim=2)

    before = outputs()
    for t in (query, key, value):
        t[:, :, 0] += 1.0
    after = outputs()
    assert torch.equal(after[:, :, 5:], before[:, :, 5:])
    assert not torch.equal(after[:, :, :5], before[:, :, :5])


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_bf16_error_is_at_most_twice_that_of_one_call(exchange):
    """Partial outputs and gradients over 8 ranks round no worse than one bf16 call does."""
    row = PackedRow.from_lengths([4096])
    tensors = whole_tensors(row, kv_heads=2, head_dim=16, v_head_dim=16)
    exact = oracle(row, *tensors)
    low = [t.bfloat16() for t in tensors]
    single = [t.clone().requires_grad_() for t in low[:3]]
    out = F.scaled_dot_product_attention(*single, is_causal=True, enable_gqa=True)
    plain = [out.detach(), *torch.autograd.grad(out, single, low[3])]
    plan = plan_step(row, 8, "zigzag", exchange)
    ranks = Loopback(8).run(lambda t: run_rank(t, plan, low, "flash"))
    order = torch.argsort(torch.cat([torch.from_numpy(plan.shards.rows(r)) for r in range(8)]))
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        ours = torch.cat([r[i] for r in ranks], dim=2)[:, :, order]

        def rms(x, i=i):
            return (x.double() - exact[i]).square().mean().sqrt().item()

        assert rms(ours) <= 2 * rms(plain[i]), name


def test_without_a_step_it_is_plain_sdpa():
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    assert torch.equal(cp_blockdiag_sdpa(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert torch.equal(
        cp_blockdiag_sdpa(q, k, v, scale=0.3, attn_mask=mask),
        F.scaled_dot_product_attention(q, k, v, scale=0.3, attn_mask=mask),
    )
    assert torch.equal(
        cp_blockdiag_sdpa(q, k, v, is_causal=True),
        F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )


def alone(lengths, **kwargs):
    return CpStep.make(plan_step(PackedRow.from_lengths(lengths), 1), as_transport(None), **kwargs)


def test_the_open_step_serves_and_closes_and_counts():
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    outer, inner = alone([8]), alone([4, 4])
    state.reset_cp_attn_fire_count()
    with outer:
        with inner:
            two = cp_blockdiag_sdpa(q, k, v)
        one = cp_blockdiag_sdpa(q, k, v)
    assert state._CP_BLOCKDIAG_STATE.get() is None
    assert state.cp_attn_fire_count() == 2
    cp_blockdiag_sdpa(q, k, v)  # plain SDPA is not counted
    assert state.cp_attn_fire_count() == 2
    torch.testing.assert_close(one, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    torch.testing.assert_close(two[:, :, :4], one[:, :, :4])
    assert not torch.allclose(two[:, :, 4:], one[:, :, 4:])


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        ({"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, r"attn_mask of shape \(8, 8\)"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_arguments_that_are_not_honoured_are_named(kwargs, said):
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(UnsupportedError, match=said):
        cp_blockdiag_sdpa(q, q, q, step=alone([8]), **kwargs)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ([(1, 2, 6, 4)] * 3, "has batch 1 and 6 rows, the step has batch 1 and 8 rows"),
        ([(2, 2, 8, 4)] * 3, "batch 2"),
        ([(1, 4, 8, 4), (1, 3, 8, 4), (1, 3, 8, 4)], "3 K/V heads do not divide 4 query heads"),
        ([(1, 4, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4)], "enable_gqa=True"),
        ([(1, 2, 8, 4), (1, 2, 8, 4), (1, 1, 8, 4)], "2 key heads but 1 value heads"),
        ([(1, 2, 8, 4), (1, 2, 8, 6), (1, 2, 8, 4)], "query head size 4 but key head size 6"),
        ([(2, 8, 4)] * 3, "query is 3-D"),
    ],
)
def test_shapes_that_do_not_fit_are_named_before_any_collective(shapes, said):
    with pytest.raises(StepError, match=said):
        cp_blockdiag_sdpa(*(torch.randn(s) for s in shapes), step=alone([8]))


def test_a_bad_rank_ends_every_rank():
    """One rank raises inside attention: its peer gets an error, not a hang."""
    plan = plan_step(PackedRow.from_lengths([8]), 2)
    seen = {}

    def body(t):
        kv_heads = 3 if t.rank == 1 else 2
        q, k = torch.randn(1, 4, 4, 8), torch.randn(1, kv_heads, 4, 8)
        try:
            cp_blockdiag_sdpa(q, k, k, enable_gqa=True, step=CpStep.make(plan, t))
        except Exception as error:
            seen[t.rank] = str(error)
            raise

    with pytest.raises(StepError, match=r"rank 1 of 2 \(cp\).*do not divide"):
        Loopback(2, timeout_s=20).run(body)
    assert f"rank 0 of 2 (cp): all_gather (plan {plan.digest[:8]}, forward) failed" in seen[0]
    assert "waiting for rank 1: it ended" in seen[0]
    assert "rank 1 ended with StepError: rank 1 of 2 (cp): attention does not fit" in seen[0]


def test_recompute_without_its_step_raises_and_with_it_is_exact():
    """Two microbatches outstanding: A and B forward, then A and B backward, gradients exact."""
    from torch.utils.checkpoint import checkpoint

    rows = [PackedRow.from_lengths([3, 5]), PackedRow.from_lengths([6, 2])]
    inputs = [whole_tensors(row, kv_heads=HEADS, v_head_dim=8) for row in rows]
    plans = [plan_step(row, 2, kv_exchange="a2a") for row in rows]

    def block(q, k, v, step=None):
        return cp_blockdiag_sdpa(q, k, v, step=step)

    def body(t):
        outs, leaves = [], []
        for plan, (q, k, v, _) in zip(plans, inputs, strict=True):
            mine = [local(x, plan, t.rank).clone().requires_grad_() for x in (q, k, v)]
            step = CpStep.make(plan, t)
            outs.append(checkpoint(block, *mine, step=step, use_reentrant=False))
            leaves.append(mine)
        return [
            [out.detach(), *torch.autograd.grad(out, mine, local(grad, plan, t.rank))]
            for out, mine, plan, (*_, grad) in zip(outs, leaves, plans, inputs, strict=True)
        ]

    ranks = Loopback(2).run(body)
    for i, (plan, row, tensors) in enumerate(zip(plans, rows, inputs, strict=True)):
        assert_matches(plan, [r[i] for r in ranks], oracle(row, *tensors))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("open_in_backward", [True, False])
def test_a_recompute_never_trusts_the_open_step(use_reentrant, open_in_backward):
    from torch.utils.checkpoint import checkpoint

    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    step = alone([8])
    with step:
        out = checkpoint(lambda x: cp_blockdiag_sdpa(x, x, x), q, use_reentrant=use_reentrant)
    around_backward = step if open_in_backward else contextlib.nullcontext()
    with around_backward, pytest.raises(StepError, match="recompute without its step"):
        out.sum().backward()
