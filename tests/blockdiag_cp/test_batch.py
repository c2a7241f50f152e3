"""shard_batch: what each rank gets, and what it says about a bad batch."""

import threading

import pytest
import torch

from longpack import PackedRow, current_blockdiag_cp_state, make_cp_blockdiag_batch_and_ctx
from longpack import shard_batch as shard
from longpack.blockdiag_cp import state
from longpack.blockdiag_cp.step import CpStep
from longpack.collectives import Loopback, as_transport
from longpack.errors import AgreementError, LongpackError, PackingError, PlanError, StepError
from longpack.plan import LAYOUTS, CostModel, Machine, Plan, plan_step


def make(lengths=(5, 3), padding=0, **extra):
    row = PackedRow.from_lengths(lengths, padding)
    ids = torch.arange(10, 10 + row.length)[None]
    return {"input_ids": ids, "doc_ids": torch.from_numpy(row.doc_ids())[None], **extra}


def ranks_of(batch, world_size, *args, **kwargs):
    return Loopback(world_size).run(lambda t: shard(batch, t, *args, **kwargs))


def test_rows_positions_and_padding():
    first, second = ranks_of(make([4, 3]), 2, padding_token_id=99)
    assert first.inputs["input_ids"].tolist() == [[10, 11, 12, 13]]
    assert second.inputs["input_ids"].tolist() == [[14, 15, 16, 99]]  # 7 tokens: 8 rows
    assert second.inputs["position_ids"].tolist() == [[0, 1, 2, 0]]  # reset per document
    assert first.inputs["cp_step"] is first.step
    assert first.inputs["use_cache"] is False
    assert "doc_ids" not in first.inputs


def test_rotary_rows_follow_the_global_order():
    first, _ = ranks_of(make([4, 4]), 2, "zigzag")
    assert first.inputs["input_ids"].tolist() == [[10, 13, 14, 17]]
    assert first.inputs["position_ids"].tolist() == [[0, 3, 0, 3]]


def test_multimodal_positions_say_nothing_beside_what_says_where_documents_are():
    """Three rows, none known to count text tokens: the remedy that their error names works."""
    positions = torch.tensor([[0, 1, 1, 1, 0, 1, 2, 3]]).expand(3, 1, 8)
    first, second = ranks_of(make([4, 4], position_ids=positions), 2)
    assert first.plan.row.lengths == (4, 4)
    assert second.inputs["position_ids"].tolist() == [[[0, 1, 2, 3]]] * 3
    for wrong in ({"doc_ids": None}, {"position_ids": positions[..., :7]}):
        with pytest.raises(PackingError, match="Pass text_row=, or doc_ids"):
            shard(make([4, 4], position_ids=positions) | wrong)


def test_multimodal_positions_are_split_on_the_last_dim():
    positions = torch.stack([torch.arange(8)[None], *[torch.arange(8)[None] * k for k in (2, 3)]])
    ranks = ranks_of(make([8], position_ids=positions), 2, text_row=0)
    assert ranks[1].inputs["position_ids"].shape == (3, 1, 4)
    assert ranks[1].inputs["position_ids"][:, 0].tolist() == [
        [4, 5, 6, 7],
        [8, 10, 12, 14],
        [12, 15, 18, 21],
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_unshard_restores_every_row_tensor(layout, world_size):
    embeds = torch.randn(2, 9, 4, dtype=torch.float64)
    batch = {"inputs_embeds": embeds, "doc_ids": torch.tensor([[1] * 5 + [2] * 4, [1] * 9])}

    def body(t):
        sharded = shard(batch, t, layout)
        x = sharded.inputs["inputs_embeds"].clone().requires_grad_()
        whole = sharded.unshard(x)
        (grad,) = torch.autograd.grad(whole, x, embeds / t.world_size)
        return whole.detach(), sharded.unshard(grad)

    for whole, grad in Loopback(world_size).run(body):
        assert torch.equal(whole, embeds)
        torch.testing.assert_close(grad, embeds, rtol=1e-14, atol=0)


def test_unshard_of_another_dim():
    def body(t):
        sharded = shard(make([8]), t, "head_tail")
        return sharded.unshard(sharded.inputs["input_ids"].expand(3, -1)[None], dim=2)

    assert Loopback(2).run(body)[0].tolist() == [[list(range(10, 18))] * 3]


def test_further_row_tensors_are_split_alike():
    weights = torch.arange(8.0)[None]
    ranks = ranks_of(make(weights=weights, note=None), 2)
    assert ranks[1].inputs["weights"].tolist() == [[4.0, 5.0, 6.0, 7.0]]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"pixels": torch.zeros(3, 3)}, r"batch\['pixels'\] is \(3, 3\), not a tensor of \[1, 8"),
        ({"name": "a"}, r"batch\['name'\] is str"),
        ({"labels": torch.zeros(1, 7)}, r"batch\['labels'\] is \(1, 7\)"),
        (
            {"labels": torch.zeros(1, 8), "shift_labels": torch.zeros(1, 8)},
            "labels and shift_labels",
        ),
    ],
)
def test_what_cannot_be_split_is_named(extra, said):
    with pytest.raises(PackingError, match=said):
        shard(make(**extra))


def test_unknown_knobs_list_the_accepted():
    with pytest.raises(PlanError, match="contiguous, head_tail, zigzag"):
        shard(make(), layout="ring")
    with pytest.raises(ValueError, match="halo"):
        shard(make(), kv_exchange="ring")
    with pytest.raises(ValueError, match="dense"):
        shard(make(), attn_backend="ring")


def test_configured_knobs_are_taken_and_synonyms_work():
    try:
        state.configure_cp_varlen("sdpa", "needed-only")
        step = ranks_of(make(), 2)[0].step
        assert (step.attn_backend, step.plan.kv_exchange) == ("dense", "halo")
        step = ranks_of(make(), 2, kv_exchange="All-To-All", attn_backend="FA2")[0].step
        assert (step.attn_backend, step.plan.kv_exchange) == ("flash", "a2a")
    finally:
        state.configure_cp_varlen()


def test_ranks_with_different_packs_all_raise_naming_the_first_difference():
    batches = [make([4, 4]), make([5, 3])]
    said = {}

    def body(t):
        try:
            shard(batches[t.rank], t)
        except AgreementError as error:
            said[t.rank] = str(error)

    Loopback(2).run(body)
    for rank in (0, 1):
        assert f"rank {rank} of 2 (cp): ranks hold different batches" in said[rank]
        assert "document 0 covers rows (0, 4) on 0 and (0, 5) on 1" in said[rank]


def test_different_options_are_named():
    said = []

    def body(t):
        try:
            shard(make(), t, layout=["contiguous", "zigzag"][t.rank])
        except AgreementError as error:
            said.append(str(error))

    Loopback(2).run(body)
    assert all("layout is contiguous on rank 0 and zigzag on rank 1" in s for s in said)
    assert len(said) == 2


def test_a_rank_that_cannot_read_its_batch_ends_every_rank():
    batches = [make(), {"input_ids": torch.zeros(1, 8)}]
    said = {}

    def body(t):
        try:
            shard(batches[t.rank], t)
        except LongpackError as error:
            said[t.rank] = f"{type(error).__name__}: {error}"

    Loopback(2).run(body)
    assert said[1].startswith("PackingError: the batch (keys: ['input_ids']) does not say")
    assert said[0].startswith("AgreementError: rank 0 of 2 (cp): rank 1 could not plan this step")


@pytest.mark.parametrize("on_host", [True, False])
def test_agreement_is_checked_by_default_where_no_device_waits(on_host):
    batches = [make([4, 4]), make([5, 3])]

    def body(t):
        t.moves_host_tensors = on_host
        shard(make(), t)  # the first step: agreed
        shard(batches[t.rank], t, check_agreement=False)
        with pytest.raises(AgreementError):
            shard(batches[t.rank], t, check_agreement=True)
        if on_host:
            with pytest.raises(AgreementError, match=r"document 0 covers rows \(0, 4\) on 0"):
                shard(batches[t.rank], t)
        else:
            shard(batches[t.rank], t)
        return True

    assert Loopback(2).run(body) == [True, True]


@pytest.mark.parametrize("key", ["input_ids", "labels"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_one_other_token_is_another_batch(key, steps_before):
    """The same documents, one token changed: a loader that is not seeded alike."""
    batches = [make(labels=torch.arange(8)[None]) for _ in range(2)]
    batches[1][key] = batches[1][key].clone()
    batches[1][key][0, 2] += 1

    def body(t):
        for _ in range(steps_before):
            shard(make(), t)
        with pytest.raises(AgreementError, match=f"alike, but {key} of rank 1 and of rank 0"):
            shard(batches[t.rank], t)

    Loopback(2).run(body)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_the_same_documents_split_otherwise_are_told(steps_before, monkeypatch):
    """Another version of longpack on one rank: all that plans are made of is the same."""

    def body(t):
        for _ in range(steps_before):
            shard(make(), t)
        if t.rank == 1:
            monkeypatch.setattr(
                Plan, "digest", property(lambda plan: f"{threading.get_ident():016x}")
            )
        with pytest.raises(AgreementError, match="documents are split differently on rank 0 and"):
            shard(make(), t)

    Loopback(2).run(body)


def test_other_stages_on_one_rank_are_told():
    def body(t):
        with pytest.raises(AgreementError, match="stages is 1 on rank 0 and 2 on rank 1"):
            shard(make(), t, stages=1 + t.rank)

    Loopback(2).run(body)


def test_a_rank_that_cannot_read_a_later_batch_ends_every_rank():
    said = {}

    def body(t):
        shard(make(), t)
        try:
            shard(make() if t.rank == 0 else {"input_ids": torch.zeros(1, 8)}, t)
        except LongpackError as error:
            said[t.rank] = f"{type(error).__name__}: {error}"

    Loopback(2).run(body)
    assert said[1].startswith("PackingError: the batch (keys: ['input_ids']) does not say")
    assert said[0].startswith("AgreementError: rank 0 of 2 (cp): rank 1 could not plan this step")


def check_gloo_disagreement(rank, world_size):
    import torch.distributed as dist

    with pytest.raises(AgreementError, match=r"rank \d of 2 \(cp\): ranks hold different batches"):
        shard(make([4, 4] if rank == 0 else [5, 3]), dist.group.WORLD, check_agreement=True)
    shard(make(), dist.group.WORLD, check_agreement=True)  # and the group still works


def test_gloo_ranks_disagree_without_a_hang(on_ranks):
    on_ranks(check_gloo_disagreement, world_size=2)


def test_a_plan_for_another_world_is_refused():
    with pytest.raises(StepError, match="plan is for 4 ranks but the cp axis has 1"):
        CpStep.make(plan_step(PackedRow.from_lengths([8]), 4), as_transport(None))


def test_the_active_step_tells_recurrent_layers_what_they_need():
    assert current_blockdiag_cp_state() is None
    sharded = shard(make([3, 2], padding=2))
    with sharded.step:
        active = current_blockdiag_cp_state()
        assert active is sharded.step
        assert active.packed_cu_seqlens_cpu.tolist() == [0, 3, 5, 7]
        assert active.packed_cu_seqlens.device == active.device
        assert active.group is sharded.step.transport.group
    assert current_blockdiag_cp_state() is None


def test_the_door_of_the_familys_code():
    """ctx is called, labels are taken as they are, loss_mask and padding_mask are split."""
    batch = {
        "input_ids": torch.arange(5)[None],
        "labels": torch.arange(5)[None],
        "_packed_seq_ids": torch.tensor([[1, 1, 2, 2, 0]]),
    }
    before = dict(batch)
    mask = torch.tensor([[0, 1, 1, 1, 1]])

    def body(t):
        _, local, layout = make_cp_blockdiag_batch_and_ctx(
            t, None, batch, loss_mask=mask, padding_token_id=7
        )
        assert (layout.original_seq_len, layout.padded_seq_len) == (5, 6)
        return local

    first, second = Loopback(2).run(body)
    assert batch == before
    assert first["labels"].tolist() == [[-100, 1, 2]]
    assert second["labels"].tolist() == [[3, -100, -100]]
    assert second["loss_mask"].tolist() == [[1, 1, 0]]
    assert second["padding_mask"].tolist() == [[False, True, True]]
    assert second["input_ids"].tolist() == [[3, 4, 7]]
    ctx, _, layout = make_cp_blockdiag_batch_and_ctx(None, None, batch)
    with ctx():
        assert current_blockdiag_cp_state().plan == layout.plan
    assert current_blockdiag_cp_state() is None


def test_auto_takes_the_given_cost_model():
    """Free links: the most even layout wins. Links that cost everything: the least traffic."""
    batch = make([60, 4, 30, 2])

    def chosen(bytes_per_s):
        machine = Machine(near_bytes_per_s=bytes_per_s, far_bytes_per_s=bytes_per_s, segment_s=0)
        model = CostModel(machine=machine)
        return ranks_of(batch, 2, "auto", kv_exchange="a2a", cost_model=model)[0].plan

    even, still = chosen(1e30), chosen(1.0)
    assert even.imbalance < 1.01 < still.imbalance
    assert max(still.received_tokens) < max(even.received_tokens)


def test_a_bad_knob_on_one_rank_is_told_to_all():
    said = {}

    def body(t):
        try:
            shard(make(), t, attn_backend=["flash", "ring"][t.rank])
        except ValueError as error:
            said[t.rank] = str(error)
        except AgreementError as error:
            said[t.rank] = f"agreement: {error}"

    Loopback(2, timeout_s=20).run(body)
    assert said[0].startswith("agreement: rank 0 of 2 (cp): rank 1 could not plan this step")
    assert "attn_backend='ring' is unknown" in said[1]


@pytest.mark.parametrize("knob", [0, False, b""])
def test_a_knob_that_is_false_is_not_taken_for_none(knob):
    with pytest.raises(ValueError, match="is unknown; it is one of"):
        shard(make(), kv_exchange=knob)


@pytest.mark.parametrize("fill", [300, -1, 0.5, None])
def test_a_padding_token_that_the_ids_cannot_hold(fill):
    batch = make()
    batch["input_ids"] = batch["input_ids"].to(torch.uint8)
    with pytest.raises(PackingError, match="padding_token_id is"):
        shard(batch, padding_token_id=fill)


def test_a_loss_mask_that_would_broadcast():
    batch = make([3], labels=torch.ones(1, 3).long())
    with pytest.raises(PackingError, match=r"loss_mask is \(1, 3, 1\) on cpu; pass \[B, S\]"):
        make_cp_blockdiag_batch_and_ctx(None, None, batch, torch.ones(1, 3, 1))


def test_positions_of_any_width_are_split():
    positions = torch.tensor([[0, 1, 0]], dtype=torch.uint32)
    local = shard(make([2, 1], position_ids=positions)).inputs["position_ids"]
    assert local.tolist() == [[0, 1, 0]]
