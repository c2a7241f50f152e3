"""Stock transformers models, packed and split, against documents run one by one."""

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

import longpack.integrations.huggingface as hf
from longpack import PackedRow, shard_batch
from longpack.blockdiag_cp.state import cp_attn_fire_count, reset_cp_attn_fire_count
from longpack.collectives import Loopback, as_transport
from longpack.errors import StepError, UnsupportedError

LENGTHS = [11, 1, 20, 7, 9]
MODELS = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 64},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
}


def make_model(model_type, attn_implementation="longpack", **extra):
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        model_type,
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **MODELS.get(model_type, {}),
            **extra,
        },
    )
    model = AutoModelForCausalLM.from_config(
        config,
        attn_implementation=attn_implementation,
        experts_implementation="eager",  # grouped matrix products have no fp64
    )
    return model.double().train()


def make_batch(lengths=LENGTHS, padding=4):
    torch.manual_seed(2)
    row = PackedRow.from_lengths(lengths, padding)
    ids = torch.randint(3, 128, (1, row.length))
    labels = torch.where(torch.rand(1, row.length) < 0.1, -100, ids)
    return {"input_ids": ids, "labels": labels, "doc_ids": torch.from_numpy(row.doc_ids())[None]}


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def documents_one_by_one(model, batch):
    """Loss and gradients by stock attention, each document alone, mean over all targets."""
    ids, labels, doc_ids = (batch[k][0] for k in ("input_ids", "labels", "doc_ids"))
    total, count = 0.0, 0
    for d in range(1, int(doc_ids.max()) + 1):
        mine = doc_ids == d
        logits = model(input_ids=ids[mine][None], use_cache=False).logits[0]
        count += int((labels[mine][1:] != -100).sum())
        total = total + torch.nn.functional.cross_entropy(
            logits[:-1], labels[mine][1:], ignore_index=-100, reduction="sum"
        )
    model.zero_grad()
    (total / count).backward()
    return total.item() / count, gradients(model)


def make_replicas(world_size, model_type, checkpointed=False):
    """One equal model per rank; made here, since threads share the random stream."""
    models = [make_model(model_type) for _ in range(world_size)]
    for model in models if checkpointed else ():
        model.activation_checkpointing_enable({"use_reentrant": False})
    return models


def on_one_rank(transport, models, batch, layout, exchange):
    """This rank's loss and gradients, on its own replica."""
    model = models[transport.rank]
    sharded = shard_batch(batch, transport, layout, kv_exchange=exchange, check_agreement=False)
    loss = model(**sharded.inputs).loss
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize(
    ("world_size", "layout", "exchange"),
    [(1, "contiguous", "allgather"), (2, "contiguous", "halo"), (3, "balanced", "a2a")],
)
def test_equals_documents_one_by_one(model_type, world_size, layout, exchange, checkpointed):
    batch = make_batch()
    loss, expected = documents_one_by_one(make_model(model_type, "eager"), batch)
    models = make_replicas(world_size, model_type, checkpointed)
    ranks = Loopback(world_size).run(lambda t: on_one_rank(t, models, batch, layout, exchange))
    assert sum(part for part, _ in ranks) == pytest.approx(loss, rel=1e-6)
    for name, theirs in expected.items():
        ours = sum(grads[name] for _, grads in ranks if name in grads)
        # transformers computes norms, rotary angles and the loss in fp32 for any dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m)


def test_every_layer_attends_once_and_twice_when_checkpointed():
    sharded = shard_batch(make_batch())
    model = make_model("llama")
    reset_cp_attn_fire_count()
    model(**sharded.inputs).loss.backward()
    assert cp_attn_fire_count() == 3
    model.activation_checkpointing_enable({"use_reentrant": False})
    reset_cp_attn_fire_count()
    model(**sharded.inputs).loss.backward()
    assert cp_attn_fire_count() == 6


def test_two_checkpointed_microbatches_outstanding():
    """A forward, B forward, A backward, B backward: each recomputes with its own step."""
    batches = [make_batch([3, 5], 0), make_batch([6, 2], 0)]

    models = make_replicas(2, "llama", checkpointed=True)

    def body(t):
        model = models[t.rank]
        losses = [
            model(**shard_batch(b, t, kv_exchange="a2a", check_agreement=False).inputs).loss
            for b in batches
        ]
        found = []
        for loss in losses:
            model.zero_grad()
            loss.backward()
            found.append(gradients(model))
        return found

    ranks = Loopback(2).run(body)
    for i, batch in enumerate(batches):
        _, expected = documents_one_by_one(make_model("llama", "eager"), batch)
        for name, theirs in expected.items():
            ours = sum(rank[i][name] for rank in ranks)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_logits_unshard_into_the_order_of_the_batch():
    batch = {"input_ids": torch.randint(3, 128, (2, 12)), "doc_ids": torch.ones(2, 12).long()}
    whole = make_model("llama", "eager")(input_ids=batch["input_ids"]).logits

    models = make_replicas(3, "llama")

    def body(t):
        sharded = shard_batch(batch, t, "zigzag", check_agreement=False)
        return sharded.unshard(models[t.rank](**sharded.inputs).logits)

    for logits in Loopback(3).run(body):
        assert logits.shape == whole.shape
        torch.testing.assert_close(logits, whole, rtol=1e-5, atol=1e-6)


def test_no_step_is_an_error_not_unmasked_attention():
    batch = make_batch()
    with pytest.raises(StepError, match=r"LlamaAttention of layer 0.*without a step"):
        make_model("llama")(input_ids=batch["input_ids"], use_cache=False)


def test_an_open_step_serves_models_called_without_it():
    sharded = shard_batch(make_batch())
    model = make_model("llama")
    inputs = {k: v for k, v in sharded.inputs.items() if k != "cp_step"}
    with sharded.step:
        loss = model(**inputs).loss
    assert torch.equal(loss, model(**sharded.inputs).loss)


@pytest.mark.parametrize(
    ("model_type", "config", "said"),
    [
        ("mistral", {"sliding_window": 4}, r"sliding_window=4 \(shorter than.*20 tokens"),
        ("gemma2", {}, "softcap 50.0"),
        ("gpt_oss", {"num_local_experts": 4}, r"s_aux of shape \(4,\)"),
        ("llama", {"attention_dropout": 0.1}, "dropout=0.1"),
    ],
)
def test_what_is_not_honoured_is_named(model_type, config, said):
    model = make_model(model_type, **config)
    with pytest.raises(UnsupportedError, match=said):
        model(**shard_batch(make_batch()).inputs)


def test_a_window_wider_than_every_document_asks_nothing():
    model = make_model("mistral", sliding_window=20)
    assert model(**shard_batch(make_batch()).inputs).loss.isfinite()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"use_cache": True}, "use_cache=True"),
        ({"attention_mask": torch.ones(1, 52)}, r"attention_mask of shape \(1, 52\)"),
        ({"attention_mask": torch.ones(1, 1, 52, 52)}, r"attention_mask of shape \(1, 1, 52, 52\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 52])}, "cu_seq_lens_q"),
        ({"output_attentions": True}, "output_attentions"),
        ({"window_bias": 3}, "window_bias 3"),
    ],
)
def test_model_arguments_that_change_attention_are_named(arguments, said):
    with pytest.raises(UnsupportedError, match=said):
        make_model("llama")(**{**shard_batch(make_batch()).inputs, **arguments})


def test_an_argument_can_be_declared_inert():
    hf.register("longpack_inert", inert_arguments=["run_name"])
    model = make_model("llama", "longpack_inert")
    assert model(**shard_batch(make_batch()).inputs, run_name="a").loss.isfinite()


def test_sparse_attention_is_refused():
    model = make_model("deepseek_v32", **MODELS["deepseek_v3"], index_topk=8, index_n_heads=4)
    with pytest.raises(UnsupportedError, match="index_topk"):
        model(**shard_batch(make_batch()).inputs)


def test_a_layer_left_on_stock_attention_is_named():
    model = make_model("llama")
    assert hf.find_faults(model) == []
    hf.check_model(model)
    odd = model.model.layers[1].self_attn
    odd.config = type(odd.config)(**odd.config.to_dict())
    odd.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedError, match=r"'sdpa'.*model\.layers\.1\.self_attn$"):
        hf.check_model(model)


def test_layers_that_cannot_be_right_are_named_before_a_step():
    assert "sinks" in " ".join(hf.find_faults(make_model("gpt_oss", num_local_experts=4)))
    assert "softcap" in " ".join(hf.find_faults(make_model("gemma2")))
    linear = make_model(
        "qwen3_next",
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    faults = " ".join(hf.find_faults(linear))
    assert "recurrent" in faults
    assert "model.layers.0.linear_attn" in faults


@pytest.mark.parametrize("kind", ["bloom", "roformer"])
def test_a_model_that_attends_by_itself_is_named(kind):
    """They take any attn_implementation and use none."""
    config = transformers.CONFIG_MAPPING[kind](vocab_size=32, hidden_size=32)
    config.is_decoder, config._attn_implementation = True, "longpack"
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="longpack")
    assert any("attend by themselves" in fault for fault in hf.find_faults(module))


def test_a_layer_that_inherits_and_attends_by_itself_is_named():
    class Own(LlamaAttention):
        def forward(self, hidden_states, **kwargs):
            return torch.nn.functional.scaled_dot_product_attention(*[hidden_states] * 3), None

    class WrappedAttention(LlamaAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = make_model("llama")
    for kind, named in ((Own, True), (WrappedAttention, False)):
        model.model.layers[1].self_attn.__class__ = kind
        assert ("attend by themselves" in " ".join(hf.find_faults(model))) == named


def test_blocks_compiled_one_by_one_share_a_graph():
    """More layers than torch compiles one function for: a graph must be of no layer alone."""
    torch._dynamo.reset()
    model = make_model("llama", num_hidden_layers=12)
    batch = shard_batch(make_batch()).inputs
    expected = model(**batch).loss
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.testing.assert_close(model(**batch).loss, expected)
    assert counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


def test_a_dropout_module_is_read_like_a_number():
    module = make_model("llama").model.layers[0].self_attn
    module.attention_dropout = torch.nn.Dropout(0.5)
    assert "attention_dropout > 0" in " ".join(hf.find_faults(module.train()))
    assert hf.find_faults(module.eval()) == []


def test_one_rank_takes_the_same_path():
    assert as_transport(None).world_size == 1
    sharded = shard_batch(make_batch())
    assert sharded.step.plan.world_size == 1
    assert sharded.step.plan.received_tokens == (0,)
