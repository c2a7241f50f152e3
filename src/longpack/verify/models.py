"""Load the model to verify, made small enough to run here; say what was made smaller."""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longpack.errors import RunError

MAX_PARAMETERS = 100_000_000  # copies for each rank and one in fp64 then fit in 4 GB
MAX_LAYERS = 4

# Fields of a transformers config that are widths, divided alike when a model is made narrower.
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "kv_lora_rank",
    "q_lora_rank",
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model, what it is, what was made smaller, and how it reads text.

    Args:
        encode: text to token ids; None where there is no tokenizer.
    """

    model: torch.nn.Module
    about: str
    notes: tuple[str, ...] = ()
    encode: Callable[[str], list[int]] | None = None


def load_model(source: Any, dtype: torch.dtype | None = None) -> Loaded:
    """Return the model that a source names.

    Args:
        source: a module; a function that returns one; a mapping with `model_type` and fields of
            that transformers config (random weights); `smollm2`; the folder of a saved
            transformers model; a TOML file of config fields; or `MODULE:FUNCTION`.
        dtype: of the parameters; the model's own, or float32 for random weights, by default.

    Raises:
        RunError: there is no such model.
    """
    if isinstance(source, torch.nn.Module):
        return Loaded(source, type(source).__name__)
    if isinstance(source, Mapping):
        return _from_config(source, dtype)
    if callable(source):
        return _from_function(source)
    if str(source) == "smollm2":
        return _smollm2(dtype)
    if Path(source).is_dir():
        return _from_folder(Path(source), dtype)
    if Path(source).suffix == ".toml" and Path(source).is_file():
        import tomllib

        table = tomllib.loads(Path(source).read_text(encoding="utf-8"))
        return _from_config(table.get("model", {}).get("config", table), dtype)
    if ":" in str(source):
        return _from_function(import_function(str(source)))
    raise RunError(
        f"model {str(source)!r} is not 'smollm2', a folder, a .toml file or MODULE:FUNCTION "
        "(nothing is downloaded)"
    )


def import_function(name: str) -> Callable[..., Any]:
    """Return what `MODULE:FUNCTION` names.

    Raises:
        RunError: there is no such module, or nothing callable of that name in it.
    """
    module_name, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), function, None)
    except ModuleNotFoundError as error:
        raise RunError(f"{name}: {error}; name an importable module before the ':'") from None
    if not callable(found):
        raise RunError(f"{name}: module {module_name} has no function {function!r}")
    return found


def vocabulary(model: Any) -> int:
    """Return how many tokens the model's first embedding knows.

    Raises:
        RunError: it has none.
    """
    if hasattr(model, "get_input_embeddings"):
        return model.get_input_embeddings().weight.shape[0]
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    if not sizes:
        raise RunError(f"{type(model).__name__} has no nn.Embedding to make tokens for: pass batch")
    return sizes[0]


def has_experts(model: torch.nn.Module) -> bool:
    """Say whether a transformers model routes rows to experts."""
    config: Any = getattr(model, "config", None)
    return any(getattr(config, name, None) for name in EXPERTS)


def _from_function(function: Callable[..., Any]) -> Loaded:
    torch.manual_seed(0)  # ranks that are processes must build the same model
    model = function()
    if not isinstance(model, torch.nn.Module):
        raise RunError(f"{function.__name__}() returned {type(model).__name__}, not a torch module")
    return Loaded(model, f"{type(model).__name__} of {function.__module__}:{function.__name__}")


def _smollm2(dtype: torch.dtype | None) -> Loaded:
    from longpack.integrations.smollm2 import load_smollm2, load_smollm2_tokenizer

    _know_longpack()
    model = load_smollm2(dtype or torch.float32, num_hidden_layers=MAX_LAYERS)
    tokenizer = load_smollm2_tokenizer()
    return Loaded(
        model,
        "SmolLM2-135M",
        (f"the first {MAX_LAYERS} of its 30 layers, with their real weights",),
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
    )


def _from_config(fields: Mapping[str, Any], dtype: torch.dtype | None) -> Loaded:
    from transformers import CONFIG_MAPPING

    rest = dict(fields)
    kind = rest.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise RunError(f"model_type = {kind!r} is unknown to transformers")
    config, notes = shrink(CONFIG_MAPPING[kind](**rest))
    return Loaded(_random(config, dtype), f"{kind} with random weights", notes)


def _from_folder(folder: Path, dtype: torch.dtype | None) -> Loaded:
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise RunError(f"model folder {folder} has no config.json: save the model there first")
    whole = AutoConfig.from_pretrained(folder, local_files_only=True)
    config, notes = shrink(AutoConfig.from_pretrained(folder, local_files_only=True))
    if config.get_text_config().hidden_size != whole.get_text_config().hidden_size:
        model: Any = _random(config, dtype)
        notes = (*notes, "random weights, since its own are too wide")
    else:
        _know_longpack()
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="longpack",
            local_files_only=True,
        )
    return Loaded(model, folder.name, notes, _tokenizer(folder))


def _know_longpack() -> None:
    """Make transformers know longpack's attention, and load without progress bars."""
    import transformers

    import longpack.integrations.huggingface  # noqa: F401 -- importing registers it

    transformers.utils.logging.disable_progress_bar()


def _tokenizer(folder: Path) -> Callable[[str], list[int]] | None:
    if not (folder / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return lambda text: saved.encode(text, add_special_tokens=False)


def _random(config: Any, dtype: torch.dtype | None) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    _know_longpack()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config, dtype=dtype or torch.float32, attn_implementation="longpack"
    )


def shrink(config: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a transformers config of at most `MAX_PARAMETERS`, and what was made smaller.

    Fewer layers first (one of each kind stays), then fewer experts, then narrower, then a smaller
    vocabulary. A config that is small enough stays as it is.
    """
    notes = []
    for smaller in (_fewer_layers, _fewer_experts, _narrower, _fewer_tokens):
        count = _parameters(config)
        if count <= MAX_PARAMETERS:
            break
        said = smaller(config.get_text_config(), count)
        notes += [said] if said else []
    return config, tuple(notes)


def _fewer_layers(config: Any, count: int) -> str:
    whole, kinds = config.num_hidden_layers, getattr(config, "layer_types", None)
    last_new = max((kinds.index(kind) for kind in set(kinds)), default=0) if kinds else 0
    layers = min(whole, max(MAX_LAYERS, last_new + 1))
    if layers == whole:
        return ""
    config.num_hidden_layers = layers
    if kinds:
        config.layer_types = kinds[:layers]
    return f"the first {layers} of {whole} layers"


def _fewer_experts(config: Any, count: int) -> str:
    for name in EXPERTS:
        experts = getattr(config, name, None) or 0
        chosen = max(8, getattr(config, "num_experts_per_tok", 2) or 2)
        if experts > chosen:
            setattr(config, name, chosen)
            return f"{chosen} of {experts} experts"
    return ""


def _narrower(config: Any, count: int) -> str:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    wanted = math.sqrt(count / MAX_PARAMETERS)
    # Dividing heads and widths alike keeps the size of a head and how many share a K/V head.
    by = next((d for d in range(1, kv_heads + 1) if kv_heads % d == 0 and d >= wanted), kv_heads)
    if by == 1:
        return ""
    for name in WIDTHS:
        value = getattr(config, name, None)
        if value is not None:
            setattr(config, name, max(value // by, 1))
    return f"1/{by} of its width"


def _fewer_tokens(config: Any, count: int) -> str:
    whole = config.vocab_size
    config.vocab_size = min(whole, 8192)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), config.vocab_size - 1))
    return f"{config.vocab_size} of {whole} tokens" if config.vocab_size < whole else ""


def _parameters(config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
