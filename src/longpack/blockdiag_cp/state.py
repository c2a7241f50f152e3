"""Runtime knobs, the shared step slot and the fire counter. Standard library only.

The knobs' accepted values live here alone, so that a run file, a command line and the attention
call can never disagree about synonyms or defaults.
"""

from collections.abc import Mapping
from typing import Any

ATTN_BACKEND_DEFAULT = "flash"
ATTN_BACKEND_SYNONYMS: dict[str, tuple[str, ...]] = {
    "flash": ("flash", "flash_attn", "flash_attention", "flash_attention_2", "fa2"),
    "te": ("te", "transformer_engine", "transformerengine"),
    "dense": ("dense", "sdpa", "torch_sdpa"),
}
ATTN_BACKEND_VALUES: tuple[str, ...] = tuple(ATTN_BACKEND_SYNONYMS)

KV_EXCHANGE_DEFAULT = "allgather"
KV_EXCHANGE_SYNONYMS: dict[str, tuple[str, ...]] = {
    "allgather": ("allgather", "all_gather"),
    "halo": ("halo", "neighbor", "needed", "needed_only"),
    "a2a": ("a2a", "a2av", "all_to_all", "alltoall", "needed_a2a"),
}
KV_EXCHANGE_VALUES: tuple[str, ...] = tuple(KV_EXCHANGE_SYNONYMS)

_ATTN_BACKEND_REVERSE = {
    syn: canon for canon, syns in (ATTN_BACKEND_SYNONYMS.items()) for syn in syns
}
_KV_EXCHANGE_REVERSE = {
    syn: canon for canon, syns in (KV_EXCHANGE_SYNONYMS.items()) for syn in syns
}


class _ThreadSharedVar:
    """A slot with get, set and reset like a ContextVar's, but one value for all threads.

    Backward may recompute a block on a thread of its own, where a ContextVar would read its
    default. Right for sequential steps only: with two steps outstanding it holds the later one,
    which is why attention never trusts it in a recompute.
    """

    def __init__(self) -> None:
        self._value: Any = None

    def get(self) -> Any:
        """Return the current value, None when unset."""
        return self._value

    def set(self, value: Any) -> Any:
        """Set the value and return a token, the previous value, for `reset`."""
        token = self._value
        self._value = value
        return token

    def reset(self, token: Any) -> None:
        """Restore the value that the `set` which returned `token` replaced."""
        self._value = token


_CP_ATTN_BACKEND = ATTN_BACKEND_DEFAULT
_CP_KV_EXCHANGE = KV_EXCHANGE_DEFAULT
_CP_BLOCKDIAG_STATE = _ThreadSharedVar()
_CP_ATTN_FIRE_COUNT: list[int] = [0]


def _clean(value: Any) -> str:
    """Return the text of a knob stripped, in lower case, dashes as underscores."""
    return str(value).strip().lower().replace("-", "_")


def _normalize(knob: str, value: Any, default: str, reverse: Mapping[str, str]) -> str:
    text = "" if value is None else _clean(value)
    if text in ("", "auto", "default"):
        return default
    if text not in reverse:
        accepted = "auto, " + ", ".join(reverse)
        raise ValueError(f"{knob}={value!r} is unknown; it is one of {accepted}")
    return reverse[text]


def normalize_attn_backend(value: Any) -> str:
    """Return the canonical attention backend: `flash`, `te` or `dense`.

    Args:
        value: a name or synonym in any case; None, "", `auto` and `default` mean `flash`.

    Raises:
        ValueError: an unknown name; the message lists the accepted ones.
    """
    return _normalize("attn_backend", value, ATTN_BACKEND_DEFAULT, _ATTN_BACKEND_REVERSE)


def normalize_kv_exchange(value: Any) -> str:
    """Return the canonical K/V exchange: `allgather`, `halo` or `a2a`.

    Args:
        value: a name or synonym in any case; None, "", `auto` and `default` mean `allgather`.

    Raises:
        ValueError: an unknown name; the message lists the accepted ones.
    """
    return _normalize("kv_exchange", value, KV_EXCHANGE_DEFAULT, _KV_EXCHANGE_REVERSE)


def configure_cp_varlen(attn_backend: str = "flash", kv_exchange: str = "allgather") -> None:
    """Set the backend and exchange of steps made from now on, on this rank.

    Every rank sets the same values. A call with a bad value changes nothing.

    Args:
        attn_backend: see `normalize_attn_backend`.
        kv_exchange: see `normalize_kv_exchange`.

    Raises:
        ValueError: an unknown name.
    """
    global _CP_ATTN_BACKEND, _CP_KV_EXCHANGE
    chosen = normalize_attn_backend(attn_backend), normalize_kv_exchange(kv_exchange)
    _CP_ATTN_BACKEND, _CP_KV_EXCHANGE = chosen


def cp_varlen_runtime_config() -> dict[str, str]:
    """Return the configured `attn_backend` and `kv_exchange`, canonical names."""
    return {"attn_backend": _CP_ATTN_BACKEND, "kv_exchange": _CP_KV_EXCHANGE}


def cp_attn_fire_count() -> int:
    """Return the number of block-diagonal CP attention calls since the last reset.

    Calls repeated by a checkpoint recompute count too.
    """
    return _CP_ATTN_FIRE_COUNT[0]


def reset_cp_attn_fire_count() -> None:
    """Zero the fire counter; call it before each forward."""
    _CP_ATTN_FIRE_COUNT[0] = 0
