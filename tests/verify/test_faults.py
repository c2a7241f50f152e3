"""Each kind of fault, planted in a small model or batch, is named by the doctor."""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from tests.verify.patients import (
    HIDDEN,
    Attention,
    Block,
    Convolves,
    Counts,
    KeepsCache,
    LosesStep,
    Patient,
    Raises,
    Routed,
    Scaled,
    SkipsOnPadding,
    SoftmaxAttention,
    StockAttention,
    TakesNoStep,
)
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)

from longpack import PackedRow, cp_blockdiag_sdpa, shard_batch
from longpack.loss import IGNORE
from longpack.verify import load_model, verify_model
from longpack.verify.batches import random_batch
from longpack.verify.subject import call_model

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(model_type, **extra):
    return {"model_type": model_type, **TINY, **extra}


def found(report, kind, where="", text=""):
    """Assert that a finding of a kind names a place and says a text; return all kinds."""
    for finding in report.findings:
        about = f"{finding.fact}. {finding.cause}. {finding.remedy}"
        if finding.kind == kind and re.search(where, finding.where) and re.search(text, about):
            return [f.kind for f in report.findings]
    pytest.fail(f"no {kind} in {where!r} that says {text!r}: {list(map(str, report.findings))}")


def patient(index=1, **parts):
    """A right model with parts of one block replaced."""
    model = Patient()
    for name, part in parts.items():
        setattr(model.blocks[index], name, part)
    return model


# --- clean -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (tiny("llama"), {"world_size": 3, "layout": "zigzag", "kv_exchange": "a2a"}),
        (
            tiny(
                "qwen3_moe",
                head_dim=16,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
            ),
            {"kv_exchange": "a2a"},
        ),
        (
            tiny("gemma3_text", head_dim=16, num_key_value_heads=1, sliding_window=64),
            {"layout": "head_tail"},
        ),
        (tiny("llama"), {"dtype": torch.bfloat16, "kv_exchange": "halo"}),
        (tiny("llama"), {"dtype": torch.float64, "checkpointing": "reentrant"}),
        (Patient(), {"world_size": 4, "layout": "balanced"}),
        (TakesNoStep(), {"checkpointing": "as_is"}),
    ],
    ids=["llama", "qwen3_moe", "gemma3", "bf16", "fp64", "patient", "with_step"],
)
def test_a_right_model_gives_no_finding(model, settings):
    report = verify_model(model, **settings)
    assert report.good, [str(finding) for finding in report.findings]
    assert all(result.ran for result in report.results)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_routes_tipped_by_rounding_are_no_finding(model_type, seed):
    """In bf16 some row of these goes to another expert when it is packed."""
    fields = {"head_dim": 16, "num_experts_per_tok": 2, "num_local_experts": 4}
    if model_type == "qwen3_moe":
        fields = {**fields, "num_experts": 4, "moe_intermediate_size": 32}
    config = AutoConfig.for_model(**tiny(model_type, **fields))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="longpack", dtype=torch.bfloat16
    )
    report = verify_model(model, random_batch(128, seed), world_size=2 + seed % 3, only=["parity"])
    assert report.good, [str(finding) for finding in report.findings]


GPT_OSS = tiny("gpt_oss", num_local_experts=4, head_dim=16)


def test_gpt_oss_gives_a_true_finding():
    report = verify_model(GPT_OSS)
    found(report, "coverage", r"model\.layers\.0\.self_attn", "attention sinks")
    kinds = found(report, "argument", text=r"s_aux of shape \(4,\)")
    assert kinds.count("argument") == 1


def test_stock_gpt_oss_loses_its_packed_mask():
    model = load_model(GPT_OSS).model
    model.set_attn_implementation("eager")
    report = verify_model(model, world_size=1, only=["coverage", "boundary"])
    found(report, "coverage", r"model\.layers\.0\.self_attn", "set_attn_implementation")
    found(report, "boundary", r"^model\.layers\.0\.self_attn$", "eager masks documents by")


# --- attention that is not context parallel --------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformers_layer_left_on_stock_attention(dtype):
    model = load_model(tiny("llama")).model
    odd = model.model.layers[1].self_attn
    odd.config = type(odd.config)(**odd.config.to_dict())
    odd.config._attn_implementation = "sdpa"
    report = verify_model(model, dtype=dtype)
    found(report, "coverage", r"^model\.layers\.1\.self_attn$", "attn_implementation='sdpa'")
    found(report, "boundary", r"^model\.layers\.1\.self_attn$", "sdpa")
    found(report, "parity", r"^model\.layers\.1\.self_attn$")


@pytest.mark.parametrize("attention", [StockAttention, SoftmaxAttention, LosesStep])
def test_a_layer_of_ones_own_that_attends_by_itself(attention):
    report = verify_model(patient(attention=attention()))
    found(report, "coverage", r"^blocks\.1\.attention$", "torch's own attention")
    found(report, "boundary", r"^blocks\.1\.attention$")


def test_a_transformers_model_that_is_called_without_the_step():
    def forward(model, share):
        return model(**{k: v for k, v in share.inputs.items() if k != "cp_step"})

    report = verify_model(load_model(tiny("llama")).model, forward=forward)
    found(report, "step", text="without a step")


def test_a_cache_makes_the_model_forget_its_document_mask():
    model = load_model(tiny("llama")).model
    model.set_attn_implementation("sdpa")

    def forward(model, share):
        return model(**{**share.inputs, "use_cache": True})

    report = verify_model(model, forward=forward, world_size=1)
    found(report, "coverage", r"model\.layers\.0\.self_attn", "set_attn_implementation")
    found(report, "boundary", r"^model\.layers\.0\.self_attn$", "use_cache")


def drops_the_rest(module, query, key, value, mask, scaling=None, cp_step=None, **dropped):
    """An integration that passes on what it knows, and swallows what it does not."""
    out = cp_blockdiag_sdpa(query, key, value, scale=scaling, enable_gqa=True, step=cp_step)
    return out.transpose(1, 2), None


@pytest.mark.parametrize(
    ("config", "kind", "said"),
    [
        (tiny("mistral", sliding_window=8), "parity", "sliding_window of 8 tokens"),
        (GPT_OSS, "parity", "attention sinks"),
        (tiny("gemma2", head_dim=16), "coverage", "softcap"),
        (tiny("llama", attention_dropout=0.1), "coverage", "attention_dropout"),
    ],
    ids=["window", "sinks", "softcap", "dropout"],
)
def test_an_argument_that_is_swallowed(config, kind, said):
    AttentionInterface.register("drops_the_rest", drops_the_rest)
    AttentionMaskInterface.register("drops_the_rest", lambda **_: None)
    model = load_model(config).model
    model.set_attn_implementation("drops_the_rest")
    found(verify_model(model), kind, r"^model\.layers\.0\.self_attn", said)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (tiny("mistral", sliding_window=8), r"sliding_window=8 \(shorter than"),
        (tiny("gemma2"), "softcap"),
        (tiny("llama", attention_dropout=0.1), "attention_dropout"),
    ],
)
def test_an_argument_that_is_refused(config, text):
    report = verify_model(config)
    assert {"argument", "coverage"} & {f.kind for f in report.findings}
    assert any(re.search(text, f"{f.fact} {f.cause}") for f in report.findings)


class Masks(Attention):
    """Asks for another mask than the step's."""

    def __init__(self, asked):
        super().__init__()
        self.asked = asked

    def attend(self, query, key, value, step):
        return cp_blockdiag_sdpa(query, key, value, step=step, **self.asked)


@pytest.mark.parametrize("asked", [{"is_causal": False}, {"attn_mask": torch.ones(68, 68)}])
def test_a_mask_beside_the_step(asked):
    report = verify_model(patient(attention=Masks(asked)))
    found(report, "argument", r"^blocks\.1\.attention of rank 0$", "the step masks: causal inside")


def test_a_kernel_that_cannot_run_here():
    report = verify_model(Patient(), attn_backend="te")
    assert found(report, "argument", r"^blocks\.0\.attention of", "not installed") == ["argument"]


class OwnShare(Attention):
    """Right in the forward; in backward K and V get what this rank's queries give, no more."""

    def attend(self, query, key, value, step):
        out = super().attend(query, key, value, step)
        if step.world_size == 1:
            return out
        alone = super().attend(query.detach(), key, value, step)
        return out + (alone - alone.detach()) / step.world_size


def test_gradients_of_attention_that_differ_from_one_rank():
    report = verify_model(patient(attention=OwnShare()))
    found(report, "parity", r"^blocks\.", "one rank is right")
    assert report.result("boundary").findings == ()


class KeepsHalf(Attention):
    """Keeps what the pieces of K and V give in bf16, where there is more than one."""

    def attend(self, query, key, value, step):
        out = super().attend(query, key, value, step)
        return out.bfloat16().to(out.dtype) if step.world_size > 1 else out


def test_partial_outputs_kept_in_bf16():
    report = verify_model(patient(attention=KeepsHalf()))
    found(report, "parity", r"^blocks\.1\.attention$", "one rank is right")


# --- documents, positions, other layers that mix rows ----------------------------------------


def test_a_batch_key_that_is_dropped():
    def shard(batch, transport):
        whole = {**batch, "doc_ids": (batch["doc_ids"] > 0).long()}
        return shard_batch(whole, transport, check_agreement=False)

    report = verify_model(tiny("llama"), shard=shard)
    found(report, "documents", text="5 documents.*the plan 1 documents")
    found(report, "boundary")


def test_positions_that_are_not_reset():
    def forward(model, share):
        plan, rank = share.plan, share.step.rank
        rows = torch.from_numpy(plan.shards.rows(rank))[None]
        return model(**{**share.inputs, "position_ids": rows})

    report = verify_model(load_model(tiny("llama")).model, forward=forward)
    found(report, "positions", "position_ids of rank 0", "should be 0")


def test_positions_that_are_not_passed():
    def forward(model, share):
        return model(**{k: v for k, v in share.inputs.items() if k != "position_ids"})

    report = verify_model(load_model(tiny("llama")).model, forward=forward)
    found(report, "positions", text="given none")
    found(report, "parity")


def test_tokens_split_another_way_than_the_plan():
    def forward(model, share):
        moved = {**share.inputs, "input_ids": share.inputs["input_ids"].flip(1)}
        return call_model(model, dataclasses.replace(share, inputs=moved))

    found(verify_model(Patient(), forward=forward), "tokens", "input_ids of rank 0")


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Convolves(), "convolution"),
        (torch.nn.GRU(HIDDEN, HIDDEN, batch_first=True), "recurrent"),
    ],
    ids=["convolution", "recurrent"],
)
def test_a_layer_that_mixes_rows_of_all_documents(part, text):
    class Mixes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = part

        def forward(self, x):
            out = self.mixer(x)
            return out[0] if isinstance(out, tuple) else out

    report = verify_model(patient(mlp=Mixes()))
    found(report, "boundary", r"^blocks\.1\.mlp\.mixer", text)


def test_a_layer_that_is_wrong_only_where_rows_are_split():
    report = verify_model(patient(attention=Scaled()))
    found(report, "parity", r"^blocks\.1\.attention$", "one rank is right")
    assert report.result("boundary").findings == ()


def test_a_fault_of_one_part_in_ten_thousand_is_seen():
    class Nearly(Scaled):
        off = 1e-4

    report = verify_model(patient(attention=Nearly()))
    found(report, "parity", "attention", "one rank is right")


def test_state_that_is_kept_between_calls():
    report = verify_model(patient(attention=KeepsCache()))
    found(report, "repeat", r"^blocks\.1\.attention$", "cache")


def test_dropout_that_cannot_be_switched_off():
    class Drops(torch.nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.1)

    found(verify_model(patient(mlp=Drops())), "repeat", r"^blocks\.1\.mlp$", "dropout")


def test_dropout_layers_are_set_to_zero_and_said():
    report = verify_model(patient(mlp=torch.nn.Dropout(0.1)))
    assert report.good
    assert report.notes == ("1 dropout layers set to 0",)


# --- recompute -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "reentrant"])
def test_a_step_from_a_with_block_is_gone_in_the_recompute(mode):
    report = verify_model(TakesNoStep(), checkpointing=mode)
    assert found(report, "step", text="checkpoint recompute without its step") == ["step"]
    assert not report.result("recompute").ran


def test_a_block_that_computes_something_else_in_the_recompute():
    report = verify_model(patient(mlp=Counts()))
    assert found(report, "recompute", text="microbatch A") == ["recompute"]


def test_routes_that_flip_in_the_recompute():
    report = verify_model(Routed(replayed=False), checkpointing="as_is")
    assert found(report, "recompute", r"^experts\.[01]$") == ["recompute"]


def test_routes_that_flip_and_are_replayed():
    report = verify_model(Routed(replayed=True), checkpointing="as_is")
    assert report.good, report.findings
    said = report.result("recompute").said
    assert re.search(r"[1-9]\d* decisions of 1 channels were replayed, [1-9]", said), said


# --- ranks -----------------------------------------------------------------------------------


def test_ranks_that_hold_different_documents():
    def load(rank, world_size):
        batch = dict(random_batch(64))
        if rank == 1:
            batch["doc_ids"] = batch["doc_ids"].clamp(max=4)
        return batch

    report = verify_model(Patient(), load)
    kinds = found(report, "agreement", text="rank")
    assert kinds == ["agreement"]
    assert not report.result("parity").ran


def test_ranks_that_hold_other_tokens_in_the_same_documents():
    report = verify_model(Patient(), lambda rank, world_size: random_batch(64, seed=rank))
    found(report, "agreement", r"batch\['input_ids'\] of rank 1", "other values")


def padded_batch(tokens, padding):
    doc_ids = torch.from_numpy(PackedRow.from_lengths([tokens], padding).doc_ids())[None]
    ids = torch.arange(1, doc_ids.shape[1] + 1)[None] * doc_ids
    return {"input_ids": ids, "labels": ids.where(doc_ids > 0, IGNORE), "doc_ids": doc_ids}


@pytest.mark.parametrize(
    ("world_size", "kind", "where", "text"),
    [
        (2, "coverage", "^rank 1$", "1 attention calls and rank 0 2"),  # no K/V needs to move
        (
            3,
            "hang",
            r"^blocks\.1\.attention of rank [01]$",
            "rank 2 has ended: it makes fewer calls",
        ),
    ],
)
def test_a_rank_of_padding_that_skips_a_layer(world_size, kind, where, text):
    model = Patient()
    model.blocks[1] = SkipsOnPadding()
    batch = padded_batch(20, {2: 20, 3: 10}[world_size])
    report = verify_model(model, batch, world_size=world_size, timeout_s=2.0)
    assert found(report, kind, where, text) == [kind]


class DetachesOnPadding(Block):
    """A rank that holds padding only takes no part in backward."""

    def forward(self, x, step=None):
        out = super().forward(x, step)
        return out if step.plan.tokens[step.rank] else x + (out - x).detach()


def test_a_rank_of_padding_that_skips_a_backward():
    model = Patient()
    model.blocks[1] = DetachesOnPadding()
    report = verify_model(model, padded_batch(20, 10), world_size=3, timeout_s=2.0)
    said = "rank 0 all_to_all, rank 1 all_to_all, rank 2 all_gather"
    assert found(report, "hang", "rank", said) == ["hang"]


class OddHeads(Attention):
    """Passes fewer heads on one rank."""

    def attend(self, query, key, value, step):
        if step.rank == 1:
            key, value = key[:, :1].repeat(1, 3, 1, 1), value[:, :1].repeat(1, 3, 1, 1)
        return super().attend(query, key, value, step)


def test_a_bad_head_count_on_one_rank():
    report = verify_model(patient(attention=OddHeads()))
    said = "3 K/V heads do not divide 2"
    assert found(report, "step", r"^blocks\.1\.attention of rank 1$", said) == ["step"]


class OtherOrder(Patient):
    """Rank 1 goes through its blocks in reverse."""

    def run_blocks(self, x, step):
        for block in self.blocks if step.rank == 0 else reversed(self.blocks):
            x = block(x, step)
        return x


def test_ranks_that_attend_in_different_orders():
    report = verify_model(OtherOrder())
    found(report, "coverage", "^rank 1$", r"another order than rank 0: blocks\.1\.attention, bl")


def test_an_exception_on_one_rank_is_one_finding():
    model = Patient()
    model.blocks[1] = Raises()
    kinds = found(
        verify_model(model), "raised", r"^blocks\.1 of rank 1$", "ZeroDivisionError: boom"
    )
    assert kinds == ["raised"]
