"""Faults that people hit with systems like this one, each with its smallest input and right value.

Other tests cover more of each kind; here every kind stands by its name.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from longpack import CpStep, PackedRow, cp_blockdiag_sdpa, plan_step, shard_batch
from longpack.blockdiag_cp.state import reset_cp_attn_fire_count
from longpack.collectives import Loopback
from longpack.errors import AgreementError, PackingError, StepError, UnsupportedError
from longpack.kernels import KernelCall, choose_kernel
from longpack.loss import IGNORE, cross_entropy
from longpack.plan import EXCHANGES
from longpack.verify.oracle import oracle_attention


def tensors(length, heads=2, dim=4):
    torch.manual_seed(0)
    return [torch.randn(1, heads, length, dim, dtype=torch.float64) for _ in range(4)]


def split_attention(row, world_size, layout="contiguous", exchange="a2a", qkvg=None):
    """Output and gradients of the whole row, computed on split ranks and put together."""
    qkvg = qkvg or tensors(row.length)
    plan = plan_step(row, world_size, layout, exchange)
    padded = [F.pad(t, (0, 0, 0, plan.padded_length - row.length)) for t in qkvg]

    def body(t):
        rows = torch.from_numpy(plan.shards.rows(t.rank))
        *leaves, grad = (x[:, :, rows] for x in padded)
        leaves = [x.clone().requires_grad_() for x in leaves]
        out = cp_blockdiag_sdpa(*leaves, step=CpStep.make(plan, t))
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    ranks = Loopback(world_size, timeout_s=30).run(body)
    rows = torch.cat([torch.from_numpy(plan.shards.rows(r)) for r in range(world_size)])
    order = torch.argsort(rows)[: row.length]
    return [torch.cat(parts, dim=2)[:, :, order] for parts in zip(*ranks, strict=True)]


def whole_attention(row, qkvg=None):
    """Output and gradients of the oracle."""
    *leaves, grad = qkvg or tensors(row.length)
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = oracle_attention(*leaves, torch.from_numpy(row.doc_ids()))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_exact(row, world_size, **kwargs):
    for ours, theirs in zip(
        split_attention(row, world_size, **kwargs), whole_attention(row), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def batch_of(doc_ids, **extra):
    doc_ids = torch.tensor([doc_ids])
    return {"input_ids": torch.arange(doc_ids.shape[1])[None], "doc_ids": doc_ids, **extra}


class TestDocuments:
    def test_block_mask_replaced_by_plain_causal(self):
        row = PackedRow.from_lengths([8, 8])
        q, k, v, _ = tensors(16)
        out = split_attention(row, 2)[0]
        for start in (0, 8):
            alone = (t[:, :, start : start + 8] for t in (q, k, v))
            expected = F.scaled_dot_product_attention(*alone, is_causal=True)
            torch.testing.assert_close(
                out[:, :, start : start + 8], expected, rtol=1e-12, atol=1e-12
            )

    def test_boundaries_given_only_by_position_ids(self):
        batch = {
            "input_ids": torch.zeros(1, 8).long(),
            "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]),
        }
        assert shard_batch(batch).plan.row.lengths == (4, 4)

    def test_block_causal_mask_and_nothing_else(self):
        mask = torch.block_diag(*[torch.ones(4, 4).tril()] * 2).bool()[None, None]
        batch = {"input_ids": torch.zeros(1, 8).long(), "attention_mask": mask}
        assert shard_batch(batch).plan.row.lengths == (4, 4)

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_padding_inside(self, world_size):
        row = PackedRow.from_doc_ids([1, 1, 1, 0, 2, 2, 0, 0])
        for result in split_attention(row, world_size):
            assert (result[:, :, [3, 6, 7]] == 0).all()
            assert (result[:, :, 5] != 0).any()
        assert_exact(row, world_size)

    def test_padding_at_the_left(self):
        row = PackedRow.from_doc_ids([0, 0, 1, 1, 1, 2, 2, 2])
        assert (split_attention(row, 2)[0][:, :, :2] == 0).all()
        assert_exact(row, 2)

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_an_id_that_comes_back_is_another_document(self, world_size):
        row = PackedRow.from_doc_ids([1, 1, 2, 2, 1, 1, 3, 3])
        out = split_attention(row, world_size)[0]
        torch.testing.assert_close(out[:, :, 4], tensors(8)[2][:, :, 4])  # sees itself alone

    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_global_boundaries_on_local_rows(self, exchange):
        assert_exact(PackedRow.from_lengths([6, 2]), 2, exchange=exchange)

    def test_length_is_rounded_up(self):
        plan = plan_step(PackedRow.from_lengths([7]), 2)
        assert (plan.padded_length, plan.tokens) == (8, (4, 3))
        assert plan_step(PackedRow.from_lengths([10]), 4).padded_length == 12

    def test_uneven_shards(self):
        row = PackedRow.from_lengths([2999])
        qkvg = [t[:, :1] for t in tensors(2999)]
        whole, split = whole_attention(row, qkvg), split_attention(row, 4, qkvg=qkvg)
        for ours, theirs in zip(split, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)

    @pytest.mark.parametrize(("tokens", "world_size"), [(2, 3), (1, 8)])
    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_more_ranks_than_tokens(self, tokens, world_size, exchange):
        assert_exact(PackedRow.from_lengths([tokens]), world_size, exchange=exchange)

    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_a_rank_with_padding_only(self, exchange):
        row = PackedRow.from_lengths([120], padding=136)
        assert plan_step(row, 2).tokens == (120, 0)
        assert_exact(row, 2, exchange=exchange)

    def test_rows_past_the_last_boundary_are_zero(self):
        row = PackedRow.from_cu_seqlens([0, 4, 6], 8)
        for result in split_attention(row, 1):
            assert (result[:, :, 6:] == 0).all()

    def test_lengths_that_are_no_multiple_of_2p(self):
        plan = plan_step(PackedRow.from_lengths([137, 2041, 89]), 8, "zigzag")
        assert plan.padded_length - 2267 < 8
        assert_exact(PackedRow.from_lengths([13, 41, 9]), 8, layout="zigzag")

    def test_positions_restart_at_each_document(self):
        positions = shard_batch(batch_of([1] * 4 + [2] * 4)).inputs["position_ids"]
        assert positions[0, 4] == 0

    def test_rotary_rows_are_global(self):
        def body(t):
            return shard_batch(batch_of([1] * 4 + [2] * 4), t, "zigzag").inputs["input_ids"]

        assert Loopback(2).run(body)[0].tolist() == [[0, 3, 4, 7]]

    def test_multimodal_positions_are_split_on_the_last_dim(self):
        batch = batch_of([1] * 8, position_ids=torch.arange(8).expand(3, 1, 8))
        ranks = Loopback(2).run(lambda t: shard_batch(batch, t, text_row=0).inputs["position_ids"])
        assert ranks[1].tolist() == [[[4, 5, 6, 7]]] * 3


class TestLossAndGradients:
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_each_rank_divides_by_the_global_count(self, world_size):
        """Loss mask [1, 0, 0, 0]: the gradient of one rank, not a half or a quarter of it."""
        logits = torch.randn(1, 4, 5, dtype=torch.float64)
        targets = torch.tensor([[2, IGNORE, IGNORE, IGNORE]])
        batch = batch_of([1] * 4, shift_labels=targets, logits=logits)

        def body(t):
            inputs = shard_batch(batch, t).inputs
            mine = inputs["logits"].clone().requires_grad_()
            cross_entropy(mine, inputs["labels"], inputs["num_items_in_batch"]).backward()
            return mine.grad

        whole = logits.clone().requires_grad_()
        F.cross_entropy(whole[0], targets[0]).backward()
        torch.testing.assert_close(torch.cat(Loopback(world_size).run(body), 1), whole.grad)

    def test_a_rank_without_labels_is_finite(self):
        labels = torch.tensor([[5, 6, 7, 8] + [IGNORE] * 4])

        def body(t):
            inputs = shard_batch(batch_of([1] * 8, labels=labels), t).inputs
            logits = torch.zeros(1, 4, 9)
            return cross_entropy(logits, inputs["labels"], inputs["num_items_in_batch"]).item()

        first, second = Loopback(2).run(body)
        assert second == 0.0
        assert first == pytest.approx(torch.tensor(9.0).log().item())

    def test_labels_are_shifted_before_the_split(self):
        labels = torch.arange(16)[None]
        ranks = Loopback(2).run(lambda t: shard_batch(batch_of([1] * 16, labels=labels), t))
        assert ranks[0].inputs["labels"][0, -1] == 8

    def test_no_target_crosses_documents(self):
        labels = torch.arange(8)[None]
        targets = shard_batch(batch_of([1] * 5 + [2] * 3, labels=labels)).inputs["labels"][0]
        assert targets.tolist() == [1, 2, 3, 4, IGNORE, 6, 7, IGNORE]

    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_gradients_equal_one_rank(self, exchange):
        assert_exact(PackedRow.from_lengths([8]), 2, exchange=exchange)


class TestArguments:
    def test_the_requested_kernel_cannot_run(self):
        call = KernelCall("cuda", torch.float32, 4, 2, 64, 64)
        with pytest.raises(UnsupportedError) as error:
            choose_kernel("flash", call)
        for reason in ("flash_cpu", "flash_torch_cuda", "flash_attn", "float32"):
            assert reason in str(error.value)

    @pytest.mark.parametrize("extra", [{"attn_mask": torch.ones(8, 8)}, {"is_causal": False}])
    def test_a_mask_beside_the_step(self, extra):
        q = torch.randn(1, 1, 8, 4)
        step = shard_batch(batch_of([1] * 8)).step
        with pytest.raises(UnsupportedError, match="the step masks: causal inside each document"):
            cp_blockdiag_sdpa(q, q, q, step=step, **extra)

    # window, sinks, softcap, dropout, cache and a layer left out: tests/integrations


class TestHangs:
    def test_ranks_hold_different_packs(self):
        said = []

        def body(t):
            try:
                shard_batch(batch_of([[1] * 4 + [2] * 4, [1] * 5 + [2] * 3][t.rank]), t)
            except AgreementError as error:
                said.append(str(error))

        Loopback(2, timeout_s=20).run(body)
        assert len(said) == 2
        assert all("document 0 covers rows (0, 4) on 0 and (0, 5) on 1" in s for s in said)

    def test_one_rank_raises_inside_attention(self):
        plan = plan_step(PackedRow.from_lengths([8]), 2)

        def body(t):
            q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 4 - t.rank, 4, 8)
            cp_blockdiag_sdpa(q, k, k, enable_gqa=True, step=CpStep.make(plan, t))

        with pytest.raises(StepError, match="3 K/V heads do not divide 4"):
            Loopback(2, timeout_s=20).run(body)

    def test_ranks_recompute_in_one_order(self):
        """Two checkpointed blocks: both ranks recompute the second, then the first."""
        plan = plan_step(PackedRow.from_lengths([3, 5]), 2, kv_exchange="a2a")

        def body(t):
            order, step = [], CpStep.make(plan, t)

            def block(x, name):
                order.append(name)
                return cp_blockdiag_sdpa(x, x, x, step=step)

            x = torch.randn(1, 2, 4, 4, requires_grad=True)
            out = checkpoint(block, x, "first", use_reentrant=False)
            checkpoint(block, out, "second", use_reentrant=False).sum().backward()
            return order

        expected = ["first", "second", "second", "first"]
        assert Loopback(2, timeout_s=20).run(body) == [expected, expected]


class TestRecompute:
    def test_two_microbatches_outstanding(self):
        """A [3, 5] and B [6, 2]: A forward, B forward, A backward, B backward."""
        rows = [PackedRow.from_lengths([3, 5]), PackedRow.from_lengths([6, 2])]
        qkvg = tensors(8)

        def body(t):
            outstanding = []
            for row in rows:
                plan = plan_step(row, 2, kv_exchange="a2a")
                mine = torch.from_numpy(plan.shards.rows(t.rank))
                *leaves, grad = (x[:, :, mine] for x in qkvg)
                leaves = [x.clone().requires_grad_() for x in leaves]
                step = CpStep.make(plan, t)
                out = checkpoint(cp_blockdiag_sdpa, *leaves, step=step, use_reentrant=False)
                outstanding.append((out, leaves, grad))
            return [torch.autograd.grad(*one) for one in outstanding]

        ranks = Loopback(2).run(body)
        for i, row in enumerate(rows):
            ours = [torch.cat([rank[i][j] for rank in ranks], dim=2) for j in range(3)]
            for mine, theirs in zip(ours, whole_attention(row, qkvg)[1:], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_backward_after_the_context_has_closed(self, use_reentrant):
        reset_cp_attn_fire_count()
        q = torch.randn(1, 1, 8, 4, requires_grad=True)
        with shard_batch(batch_of([1] * 8)).step:
            out = checkpoint(cp_blockdiag_sdpa, q, q, q, use_reentrant=use_reentrant)
        with pytest.raises(StepError, match="recompute without its step"):
            out.sum().backward()

    def test_reentrant_checkpointing_with_the_step_passed_is_exact(self):
        row, (q, k, v, grad) = PackedRow.from_lengths([5, 3]), tensors(8)
        step = CpStep.make(plan_step(row, 1), Loopback(1).transport(0))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = checkpoint(
            lambda *qkv: cp_blockdiag_sdpa(*qkv, step=step), *leaves, use_reentrant=True
        )
        out.backward(grad)
        for ours, theirs in zip(leaves, whole_attention(row)[1:], strict=True):
            torch.testing.assert_close(ours.grad, theirs, rtol=1e-12, atol=1e-12)


class TestBadInput:
    @pytest.mark.parametrize(
        ("batch", "said"),
        [
            ({"input_ids": torch.zeros(1, 4)}, "does not say where its documents are"),
            (batch_of([1, 1], inputs_embeds=torch.zeros(1, 2, 3)), "both of input_ids and"),
            (batch_of([1, -2]), r"doc_ids\[1\] is -2"),
        ],
    )
    def test_batches(self, batch, said):
        with pytest.raises(PackingError, match=said):
            shard_batch(batch)
