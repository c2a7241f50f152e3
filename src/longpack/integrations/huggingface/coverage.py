"""Find layers of a model that would not run, or not rightly, under context parallelism."""

import inspect
from typing import Any

import torch

from longpack.errors import UnsupportedError

_INTERFACE = ("ALL_ATTENTION_FUNCTIONS", "attention_interface", "cp_blockdiag_sdpa")


def find_faults(model: torch.nn.Module, name: str = "longpack") -> list[str]:
    """Name every layer that would not attend through longpack, or asks what is not honoured.

    Args:
        model: a transformers model.
        name: the registered attention implementation.

    Returns:
        One sentence per kind of fault, naming the modules; empty for a model that is right.
    """
    elsewhere: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        for kind in _faults_of(module, name):
            elsewhere.setdefault(kind, []).append(path)
    return [f"{kind}: {_shown(paths)}" for kind, paths in elsewhere.items()]


def check_model(model: torch.nn.Module, name: str = "longpack") -> None:
    """Raise where `find_faults` finds any, before a step is wasted.

    Raises:
        UnsupportedError: lists every fault with the layers it concerns.
    """
    faults = find_faults(model, name)
    if faults:
        raise UnsupportedError(
            f"{type(model).__name__} cannot train with attn_implementation={name!r}: "
            f"{'; '.join(faults)}"
        )


def _faults_of(module: torch.nn.Module, name: str) -> list[str]:
    """Return the kinds of fault of one module."""
    if not _is_attention(module):
        return []
    config: Any = getattr(module, "config", None)
    used = getattr(config, "_attn_implementation", None)
    faults = []
    if hasattr(module, "conv1d"):
        faults.append("recurrent layers, which need contiguous rows and their own exchange")
    elif used is None or not _asks_interface(module):
        faults.append("layers that attend by themselves, which attn_implementation does not reach")
    elif used != name:
        remedy = f"call model.set_attn_implementation({name!r})"
        faults.append(f"layers with attn_implementation={used!r} ({remedy})")
    if getattr(module, "sinks", None) is not None:
        faults.append("layers with attention sinks (s_aux)")
    dropout = getattr(module, "attention_dropout", None) or 0.0
    dropout = dropout.p if isinstance(dropout, torch.nn.Dropout) else dropout
    if dropout > 0 and module.training:
        faults.append("layers with attention_dropout > 0 (set it to 0.0 in the config)")
    if getattr(module, "attn_logit_softcapping", None):
        faults.append("layers with attn_logit_softcapping (softcap)")
    if hasattr(module, "indexer"):
        faults.append("layers with a sparse-attention indexer (indices)")
    return faults


def _is_attention(module: torch.nn.Module) -> bool:
    """Say whether a module mixes tokens: an attention layer, or a recurrent one."""
    kind = type(module).__name__
    projects = any(hasattr(module, p) for p in ("q_proj", "qkv_proj", "c_attn", "q_a_proj"))
    recurrent = hasattr(module, "conv1d") and hasattr(module, "A_log")
    return recurrent or kind.endswith("Attention") or (projects and hasattr(module, "o_proj"))


def _asks_interface(module: torch.nn.Module) -> bool:
    """Say whether an attention layer calls what `attn_implementation` names, as its source shows.

    A few older models take any name and attend by themselves. A layer that holds the one which
    attends, or whose source is not at hand, is given the benefit of the doubt: what it does shows
    in the fire counter.
    """
    if any(_is_attention(part) for part in module.modules() if part is not module):
        return True
    for kind in type(module).__mro__:
        if "forward" not in vars(kind):
            continue
        try:
            source = inspect.getsource(kind.forward)
        except (OSError, TypeError):
            return True
        if any(word in source for word in _INTERFACE):
            return True
        if "super().forward(" not in source:
            return False
    return False


def _shown(paths: list[str]) -> str:
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return ", ".join(paths[:4]) + more
