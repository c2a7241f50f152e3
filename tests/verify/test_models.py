"""Loading what is to be verified, and making it small."""

import pytest
import torch
from tests.verify.patients import Patient
from tests.verify.test_faults import tiny
from transformers import AutoConfig

from longpack.errors import RunError
from longpack.verify import import_function, load_model
from longpack.verify.models import MAX_PARAMETERS, shrink, vocabulary


@pytest.mark.parametrize(
    ("model_type", "fields", "said"),
    [
        (
            "llama",
            {
                "hidden_size": 8192,
                "intermediate_size": 28672,
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
            },
            "the first 4 of 80 layers",
        ),
        (
            "qwen3_moe",
            {
                "hidden_size": 2048,
                "num_hidden_layers": 48,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "vocab_size": 151936,
            },
            "8 of 128 experts",
        ),
    ],
)
def test_a_big_model_is_made_small_and_said(model_type, fields, said):
    config, notes = shrink(AutoConfig.for_model(model_type, **fields))
    assert said in notes
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    assert heads % kv_heads == 0
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) <= 2 * MAX_PARAMETERS


def test_a_small_model_stays_as_it_is():
    config = AutoConfig.for_model(**tiny("llama"))
    assert shrink(config)[1] == ()
    assert config.num_hidden_layers == 3


def test_one_layer_of_each_kind_stays():
    config = AutoConfig.for_model(
        "gemma3_text", hidden_size=2560, num_hidden_layers=34, vocab_size=262144
    )
    small, _ = shrink(config)
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert len(small.layer_types) == small.num_hidden_layers


def test_a_saved_model_and_a_toml_file(tmp_path):
    saved = load_model(tiny("llama")).model
    saved.save_pretrained(tmp_path / "saved")
    loaded = load_model(tmp_path / "saved")
    theirs = dict(saved.named_parameters())
    assert all(torch.equal(p, theirs[n]) for n, p in loaded.model.named_parameters())
    assert loaded.model.config._attn_implementation == "longpack"
    fields = "\n".join(f"{k} = {v!r}" for k, v in tiny("llama").items())
    (tmp_path / "model.toml").write_text(fields)
    assert vocabulary(load_model(tmp_path / "model.toml").model) == 128


def test_a_function_returns_any_module():
    loaded = load_model("tests.verify.patients:Patient")
    assert isinstance(loaded.model, torch.nn.Module)
    assert loaded.about == "Patient of tests.verify.patients:Patient"
    assert load_model(Patient).about == loaded.about


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("gpt5", "nothing is downloaded"),
        ("nowhere:model", "No module named 'nowhere'"),
        ("tests.verify.patients:nothing", "has no function 'nothing'"),
        ({"model_type": "lama"}, "'lama' is unknown"),
        (dict, "model_type = None"),
    ],
)
def test_a_source_that_is_none(source, said):
    with pytest.raises(RunError, match=said):
        load_model(source() if source is dict else source)


def test_functions_are_imported_by_name():
    assert import_function("os.path:join")("a", "b") == "a/b"
