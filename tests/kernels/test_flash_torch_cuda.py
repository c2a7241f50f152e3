"""torch's CUDA flash attention in parts, with dense math in place of its two ops.

The stand-ins are put where the ops' CPU kernels would be, so that torch binds and checks arguments
by the ops' own schemas; they ask of tensors what the CUDA kernels ask, and what those take on
trust. The backward uses `out` and `lse` as it is given them, and runs no forward.
"""

import importlib
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.blockdiag_cp.split_rows import (
    HEADS,
    KV_HEADS,
    oracle,
    run_rank,
    run_ranks,
    whole_tensors,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from longpack import CpStep, PackedRow, cp_blockdiag_sdpa, plan_step
from longpack.blockdiag_cp import keep_in_recompute
from longpack.blockdiag_cp.overlap import StagedAttention
from longpack.collectives import Loopback
from longpack.kernels import TILED, KernelCall, Segments, Tiles, full_tiles, packed
from longpack.kernels.impl import flash_torch_cuda
from longpack.plan import EXCHANGES, LAYOUTS
from longpack.testing import DANGEROUS_ROWS

LONG = PackedRow.from_lengths([40, 7, 1, 90, 30], padding=4)
CPU = torch.device("cpu")


def check(query, key, value, cu_q, cu_k, max_q, max_k, dropout):
    """Check what both ops require."""
    assert dropout == 0.0
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert query.shape[2] % 8 == 0
    assert query.shape[1] % key.shape[1] == 0
    for x in (query, key, value):
        assert x.stride(-1) == 1
        assert not any(n % 8 for n in (*x.stride()[:-1], x.storage_offset()))  # 16 bytes, unchecked
    for lengths, longest, x in ((cu_q, max_q, query), (cu_k, max_k, key)):
        assert lengths.dtype == torch.int32
        assert lengths.is_contiguous()
        assert (lengths[0], lengths[-1]) == (0, len(x))
        assert lengths.diff().min() > 0  # else lse is +inf, and queries of one row are misread
        assert lengths.diff().max() == longest


def sequences(query, key, value, cu_q, cu_k, causal):
    """Yield rows of each sequence, query heads, keys and values for each of them, and a mask."""
    group = query.shape[1] // key.shape[1]
    for (q0, q1), (k0, k1) in zip(*map(itertools.pairwise, (cu_q, cu_k)), strict=True):
        visible = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if causal:  # aligned at the bottom right
            visible = visible.tril(k1 - k0 - (q1 - q0))
        wide = torch.promote_types(query.dtype, torch.float32)
        q, k, v = query[q0:q1].to(wide), key[k0:k1].to(wide), value[k0:k1].to(wide)
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        yield slice(q0, q1), slice(k0, k1), q, k, v, visible


class FlashOps:
    """The ops with dense math, and a list of their calls: op, causal, sequences."""

    def __init__(self):
        self.calls = []

    def forward(
        self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, **others
    ):
        assert not debug
        assert not any(x is not None for x in others.values())
        check(q, k, v, cu_q, cu_k, max_q, max_k, dropout)
        self.calls.append(("forward", causal, len(cu_q) - 1))
        out = torch.full_like(q, torch.nan)
        lse_dtype = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full((q.shape[1], len(q)), torch.nan, dtype=lse_dtype)
        for rows, _, qs, ks, vs, visible in sequences(q, k, v, cu_q, cu_k, causal):
            scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
            scores = scores.masked_fill(~visible, -torch.inf)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs).to(q.dtype)
            lse[:, rows] = scores.logsumexp(-1)
        return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def backward(
        self, grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, un, *, scale
    ):
        check(q, k, v, cu_q, cu_k, max_q, max_k, dropout)
        assert rng.dtype == torch.uint64
        assert grad.dtype == out.dtype == q.dtype
        assert grad.shape == out.shape == q.shape
        assert grad.stride(-1) == out.stride(-1) == 1
        assert lse.shape == (q.shape[1], len(q))
        assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
        assert lse.is_contiguous()
        self.calls.append(("backward", causal, len(cu_q) - 1))
        grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        for rows, keys, qs, ks, vs, visible in sequences(q, k, v, cu_q, cu_k, causal):
            scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
            weights = (scores - lse[:, rows, None]).exp().masked_fill(~visible, 0.0)
            do = grad[rows].to(qs.dtype)
            row_sum = (do * out[rows]).sum(-1).t().unsqueeze(-1)
            to_scores = weights * (torch.einsum("qhd,khd->hqk", do, vs) - row_sum) * scale
            to_key, to_value = (
                torch.einsum("hqk,qhd->khd", w, x).unflatten(1, (k.shape[1], -1)).sum(2)
                for w, x in ((to_scores, qs), (weights, do))
            )
            grads[0][rows] = torch.einsum("hqk,khd->qhd", to_scores, ks).to(q.dtype)
            grads[1][keys], grads[2][keys] = to_key.to(q.dtype), to_value.to(q.dtype)
        return tuple(grads)

    def of(self, op):
        return [call[1:] for call in self.calls if call[0] == op]


@pytest.fixture
def ops(monkeypatch):
    """Let torch's CUDA flash attention run on CPU, and be the first choice there."""
    ops, library = FlashOps(), torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", ops.forward, "CPU")
    library.impl("_flash_attention_backward", ops.backward, "CPU")
    monkeypatch.setattr(flash_torch_cuda, "reasons_against", lambda call: [])
    yield ops
    library._destroy()


def test_it_attends_in_parts():
    assert set(TILED) == {"flash_cpu", "flash_torch_cuda"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*DANGEROUS_ROWS, "long"])
def test_in_any_number_of_stages_it_equals_the_oracle(ops, name, layout):
    """In at most one call of the op for a rank's own rows, and one for each stage."""
    row = DANGEROUS_ROWS.get(name, LONG)
    tensors = whole_tensors(row, head_dim=12, v_head_dim=6)
    expected = oracle(row, *tensors)
    for world, exchange, stages in itertools.product((1, 3), EXCHANGES, (1, 3)):
        ops.calls.clear()
        plan = plan_step(row, world, layout, exchange)
        found = run_ranks(plan, tensors, stages=stages)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        for op in ("forward", "backward"):
            assert len(ops.of(op)) <= world * (1 + stages)
    assert ops.calls or not row.documents


@pytest.mark.parametrize("dims", [(16, 12), (12, 16), (8, 8)], ids=str)
def test_heads_are_aligned_wherever_they_lie(ops, dims):
    """K and V of one arrival lie side by side: rows of 28 numbers, of which kernels take 16."""
    tensors = whole_tensors(LONG, torch.float64, *dims)
    found = run_ranks(plan_step(LONG, 3, "balanced", "a2a"), tensors)
    for ours, theirs in zip(found, oracle(LONG, *tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_calls_in_numbers(ops):
    """contiguous, two ranks: documents of 4 and 20 are cut at row 12; rank 1 needs 8 rows."""
    row = PackedRow.from_lengths([4, 20])
    plan = plan_step(row, 2, "contiguous", "a2a")
    run_ranks(plan, whole_tensors(row), stages=2)
    both = [(False, 1), (False, 1), (True, 1), (True, 2)]
    assert sorted(ops.of("forward")) == sorted(ops.of("backward")) == both


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_or_not_the_bits_are_the_same(ops, layout):
    tensors = whole_tensors(LONG, torch.bfloat16)
    plan = plan_step(LONG, 3, layout, "a2a")
    on, off = (run_ranks(plan, tensors, overlap=o, stages=2) for o in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_is_rounded_once(ops, layout):
    """Pieces merge in float32: split over ranks the error is at most twice that of one call."""
    tensors = whole_tensors(LONG, torch.bfloat16, 16, 16)
    exact = oracle(LONG, *tensors)
    one, split = (run_ranks(plan_step(LONG, n, layout, "a2a"), tensors) for n in (1, 4))
    for a, b, e in zip(one, split, exact, strict=True):
        assert b.dtype == torch.bfloat16
        assert (b.double() - e).norm() < 2 * (a.double() - e).norm()


@pytest.mark.parametrize(("what", "calls"), [("nothing", 2), ("kv", 2), ("attention", 1)])
def test_a_checkpoint_keeps_what_it_is_told(ops, what, calls):
    plan = plan_step(LONG, 2, "balanced", "a2a")
    tensors = whole_tensors(LONG)
    expected = run_ranks(plan, tensors)
    once = len(ops.of("forward"))
    ops.calls.clear()

    def body(t):
        step = CpStep.make(plan, t, attn_backend="flash")
        rows = torch.from_numpy(plan.shards.rows(t.rank))
        padding = plan.padded_length - LONG.length
        *leaves, grad = (F.pad(x, (0, 0, 0, padding))[:, :, rows] for x in tensors)
        leaves = [x.clone().requires_grad_() for x in leaves]

        def block(*inputs):
            return cp_blockdiag_sdpa(*inputs, enable_gqa=True, step=step) * 1.0

        context = keep_in_recompute(what)
        out = checkpoint(block, *leaves, use_reentrant=False, context_fn=context)
        return rows, [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    for rows, found in Loopback(2).run(body):
        real = rows < LONG.length
        for ours, whole in zip(found, expected, strict=True):
            theirs = whole[:, :, rows[real]]
            torch.testing.assert_close(ours[:, :, real], theirs, rtol=1e-12, atol=1e-12)
    assert len(ops.of("forward")) == calls * once


def test_lengths_are_built_once_a_step(ops, monkeypatch):
    built, build = [], packed._pack_tiles
    monkeypatch.setattr(packed, "_pack_tiles", lambda *a: built.append(a) or build(*a))
    row = PackedRow.from_lengths([4, 20])
    plan, tensors = plan_step(row, 2, "contiguous", "a2a"), whole_tensors(row)

    def body(t):
        step = CpStep.make(plan, t, attn_backend="flash", stages=2)
        for _ in range(3):
            run_rank(t, plan, tensors, step)

    Loopback(2).run(body)
    # rank 0: own rows. rank 1: own rows, and those again to be added to, and two stages. Both ask
    # for the empty stages of rank 0 in vain.
    assert len(built) == 1 + 2 + 2 + 2


def test_on_a_device_lengths_are_there_before_the_first_call():
    plan, device = plan_step(LONG, 1), torch.device("meta")
    staged = StagedAttention.make(plan, Loopback(1).transport(0), device, True, 1)
    for tiles in (staged.local.tiles, staged.adding, *staged.remote):
        assert device in tiles._packed


def test_tiles_become_calls_in_numbers():
    """Whatever tiles were cut or gathered for, a call's sequences ascend and rows are views."""
    lengths = [3, 1, 5, 3, 70, 1]
    stops = list(itertools.accumulate(lengths))
    bounds = tuple((b - n + 2, b + 2, b - n, b) for n, b in zip(lengths, stops, strict=True))
    (call,) = Segments(bounds, 90, 83).tiles.packed(CPU)
    assert (call.causal, call.continues) == (True, False)
    assert call.cu_seqlens_q.tolist() == call.cu_seqlens_k.tolist() == [0, *stops]
    assert (call.max_seqlen_q, call.max_seqlen_k) == (70, 70)
    assert (call.queries, call.keys) == (packed.Rows(2, 85), packed.Rows(0, 83))


def test_rows_with_gaps_are_gathered():
    (call,) = Tiles(full_tiles(((0, 2, 0, 3), (4, 5, 1, 3)))).packed(CPU)
    assert (call.causal, call.continues) == (False, True)
    assert call.cu_seqlens_q.tolist() == [0, 2, 3]
    assert call.cu_seqlens_k.tolist() == [0, 3, 5]
    assert call.queries.index is not None
    assert call.queries.index.tolist() == [0, 1, 4]
    assert call.keys.index is not None
    assert call.keys.index.tolist() == [0, 1, 2, 1, 2]


def test_segments_with_earlier_keys_take_a_call_for_each_kind_of_tile(ops):
    """A full block first, then a causal one that continues; documents of their own beside them."""
    segments = Segments(((0, 3, 0, 7), (3, 8, 7, 12), (8, 9, 12, 13)), 9, 13)
    kinds = [(call.causal, call.continues) for call in segments.tiles.packed(CPU)]
    assert kinds == [(False, False), (True, False), (True, True)]
    torch.manual_seed(0)
    query, key, value = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (9, 13, 13))
    out, lse = torch.empty_like(query), query.new_empty(9, 2)
    flash_torch_cuda.forward_tiles(segments.tiles, query, key, value, 0.3, out, lse)
    whole, whole_lse, *_ = ops.forward(
        *(query, key, value),
        *(torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 8, 9], [0, 7, 12, 13])),
        *(5, 7, 0.0, True, False),
        scale=0.3,
    )
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, whole_lse.t(), rtol=1e-12, atol=1e-14)


def test_torchs_own_shapes_fit_and_nothing_is_read_from_the_device():
    """With torch's own description of the ops, on tensors that hold no numbers."""
    rows, options = 12, {"device": "meta", "dtype": torch.bfloat16}
    query, out, grad = (torch.empty(rows, HEADS, 20, **options) for _ in range(3))
    key, value = (torch.empty(rows, KV_HEADS, 20, **options) for _ in range(2))
    lse = torch.empty(rows, HEADS, device="meta")
    own = Segments(((0, 4, 0, 4), (5, 12, 5, 12)), rows, rows).tiles
    for tiles in (own, Tiles(full_tiles(((1, 3, 0, 5), (5, 9, 0, 7))))):
        buffer = torch.empty_like(out, dtype=torch.float32)
        flash_torch_cuda.forward_tiles(tiles, query, key, value, 1.0, buffer, lse)
        grads = [torch.empty_like(x, dtype=torch.float32) for x in (query, key, value)]
        saved = (query, key, value, out, lse)
        flash_torch_cuda.backward_tiles(tiles, grad, *saved, 1.0, *grads)


def test_the_operator_takes_tensors_of_a_gpu_and_a_token_of_the_host():
    """What torch.compile traces with: shapes of all results, on fake tensors."""
    attend = torch.ops.longpack.attend
    with FakeTensorMode():
        query = torch.empty(12, HEADS, 20, device="cuda", dtype=torch.bfloat16)
        key, value = (torch.empty(12, KV_HEADS, d, device="cuda") for d in (20, 12))
        token = torch.empty(8, dtype=torch.int64)
        out, lse, arrived = attend(query, key, value, token, "flash_torch_cuda", 1.0, -1)
        assert [x.device.type for x in (out, lse, arrived)] == ["cuda"] * 3
    assert (out.shape, out.dtype) == ((12, HEADS, 12), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((12, HEADS), torch.float32)
    assert arrived.shape == (7, KV_HEADS, 32)


def test_the_gpu_check_runs_it_both_ways(ops, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    parity, problems = (importlib.import_module(f"gpu_check.{n}") for n in ("parity", "problems"))
    judge = parity.Judge.of(LONG, problems.Heads(4, 2, 40, 24), torch.bfloat16, "cpu")
    for split in ((1, "contiguous"), (4, "zigzag")):
        whole, parts = judge.checks("flash_torch_cuda", problems.plan_split(LONG, *split))
        assert whole.passed, whole
        assert parts.passed, parts


def test_rocm_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    call = KernelCall("cuda", torch.bfloat16, 4, 2, 64, 64)
    assert "built for ROCm" in "; ".join(flash_torch_cuda.reasons_against(call))
