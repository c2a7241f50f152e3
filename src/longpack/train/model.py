"""The model of a run: random or real weights, longpack attention in every layer."""

import difflib
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from longpack.errors import RunError
from longpack.integrations.huggingface import check_model
from longpack.plan import LayerShape
from longpack.train.config import RunConfig
from longpack.train.tokenizer import Tokenizer


def build_model(config: RunConfig, tokenizer: Tokenizer) -> Any:
    """Return the model that `[model]` describes, on the CPU, in training mode.

    Random weights are a function of `run.seed`, so every rank has the same.

    Raises:
        RunError: an unknown model type or field, a path without a model, a vocabulary smaller
            than the tokenizer's.
        UnsupportedError: the model has layers that would not attend as they should.
    """
    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, config.model.dtype)
    if config.model.config is not None:
        model = _random_weights(config, tokenizer, dtype)
    else:
        model = _real_weights(str(config.model.name), dtype)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if vocab_size < tokenizer.vocab_size:
        raise RunError(
            f"the model knows {vocab_size} tokens but data.tokenizer = {tokenizer.name!r} makes "
            f"{tokenizer.vocab_size}: give the model's own tokenizer, or raise vocab_size"
        )
    check_model(model.train())
    if config.model.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def longest_document(model: Any, row_length: int) -> int:
    """Return the most tokens of one document: the model's positions, at most a row."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(row_length, positions or row_length)


def layer_shape(model: Any, recompute: bool) -> LayerShape:
    """Return what the model's layers cost, the output projection shared out among them.

    Args:
        model: not sharded yet.
        recompute: whether layers are checkpointed.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):  # latent attention expands K and V to every head
        kv_heads = heads
        both = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        head_dim = both // 2  # of K and V on average, which is what bytes and FLOPs depend on
    return LayerShape(
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        linear_parameters=_token_weights(model) // config.num_hidden_layers,
        element_bytes=model.dtype.itemsize,
        recompute=recompute,
    )


def _token_weights(model: Any) -> int:
    """Return how many weights multiply one token: no table of embeddings, experts it visits."""
    visited = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    weights = sum(
        p.numel() * visited // len(p) if visited and p.dim() == 3 else p.numel()
        for p in model.parameters()
    )
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output is not None and output.weight is table.weight
    return weights if tied else weights - table.weight.numel()


def shard_parameters(model: Any, mesh: DeviceMesh) -> None:
    """Shard parameters layer by layer over all ranks with FSDP2, gradients summed, not averaged.

    Args:
        model: changed in place.
        mesh: one-dimensional, of all ranks.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Each rank's loss is already its part of the mean over all ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def _random_weights(config: RunConfig, tokenizer: Tokenizer, dtype: torch.dtype) -> Any:
    assert config.model.config is not None
    fields = {
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": config.data.row_length,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": None,
        **config.model.config,
    }
    kind = _config_class(fields.pop("model_type"))
    known = [*kind().to_dict(), *kind.attribute_map]
    for name in config.model.config:
        if name != "model_type" and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(known))}"
            raise RunError(f"model.config.{name} is no field of {kind.__name__}{hint}")
    torch.manual_seed(config.run.seed)
    return AutoModelForCausalLM.from_config(
        kind(**fields), dtype=dtype, attn_implementation="longpack"
    )


def _config_class(model_type: str) -> Any:
    if model_type not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, list(transformers.CONFIG_MAPPING), 3)
        raise RunError(
            f"model.config.model_type = {model_type!r} is unknown to transformers "
            f"{transformers.__version__}; near it: {', '.join(near) or 'nothing'}"
        )
    return transformers.CONFIG_MAPPING[model_type]


def _real_weights(name: str, dtype: torch.dtype) -> Any:
    if name == "smollm2":
        from longpack.integrations.smollm2 import load_smollm2

        return load_smollm2(dtype)
    if not (Path(name) / "config.json").is_file():
        raise RunError(
            f"model.name = {name!r} is not a folder with a config.json; it is 'smollm2' or the "
            "folder of a saved transformers model (nothing is downloaded)"
        )
    return AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, attn_implementation="longpack", local_files_only=True
    )
