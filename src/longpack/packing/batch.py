"""Find the documents of a training batch, whatever convention it follows."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from longpack.errors import PackingError
from longpack.packing import read
from longpack.packing.row import PackedRow

PRIMARY = ("input_ids", "inputs_embeds")
DOCUMENT_KEYS = (
    "doc_ids",
    "_packed_seq_ids",
    "seq_idx",
    "cu_seqlens",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "position_ids",
    "attention_mask",
)
PADDED_KEYS = ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
LENGTH_KEYS = ("max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k")


def batch_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return `(B, S)` of the one primary tensor, `input_ids` or `inputs_embeds`."""
    if not isinstance(batch, Mapping):
        raise PackingError(f"the batch is {type(batch).__name__}; it must map names to tensors")
    present = [key for key in PRIMARY if batch.get(key) is not None]
    if len(present) != 1:
        found = "both" if present else "neither"
        raise PackingError(
            f"the batch holds {found} of input_ids and inputs_embeds (keys: {[*batch]}): "
            "pass exactly one"
        )
    name, value = present[0], batch[present[0]]
    if getattr(value, "is_nested", False) or not hasattr(value, "shape"):
        raise PackingError(f"{name} is {type(value).__name__} without one shape; pass a tensor")
    shape = tuple(value.shape)
    if len(shape) != (2 if name == "input_ids" else 3):
        wanted = "[B, S]" if name == "input_ids" else "[B, S, hidden]"
        raise PackingError(f"{name} has shape {shape}; it must be {wanted}")
    return shape[0], shape[1]


def read_documents(batch: Mapping[str, Any], *, text_row: int | None = None) -> PackedRow:
    """Read the documents of a batch from everything in it that speaks of documents.

    Batch rows are laid end to end, so that B > 1 means more documents of one row. A 0/1
    attention mask says which rows are padding; boundaries then come from the other keys, or
    are the batch rows when there are none.

    Args:
        batch: holds `input_ids` `[B, S]` or `inputs_embeds` `[B, S, hidden]` and at least one of
            `doc_ids`, `seq_idx`, `position_ids`, `cu_seqlens`, `cu_seq_lens_q/k`,
            `cu_seqlens_q/k` (with `cu_seqlens*_padded`) and `attention_mask`.
        text_row: see `PackedRow.from_position_ids`.

    Raises:
        PackingError: no key speaks of documents, or two contradict each other (names both).
    """
    b, s = batch_shape(batch)
    claims = _claims(batch, b, s, text_row)
    if not claims:
        raise PackingError(
            f"the batch (keys: {[*batch]}) does not say where its documents are: add one of "
            f"{', '.join(DOCUMENT_KEYS)}"
        )
    real = _agreed_padding(claims)
    bounded = {key: row for key, (row, speaks) in claims.items() if speaks != "padding"}
    if not bounded:  # a 0/1 mask alone: now its holes matter
        return PackedRow.from_attention_mask(real.reshape(b, s))
    return _agreed_documents(bounded, real)


def _claims(
    batch: Mapping[str, Any], b: int, s: int, text_row: int | None
) -> dict[str, tuple[PackedRow, str]]:
    """Return each key's documents, and whether it `speaks` of padding, bounds or both."""
    claims: dict[str, tuple[PackedRow, str]] = {}
    for key in DOCUMENT_KEYS:
        value = batch.get(key)
        if value is None:
            continue
        if key.startswith("cu_seq"):
            row, speaks = _from_offsets(batch, key, b, s), "both"
        elif key == "position_ids" and _are_mute(value, text_row, batch, b, s):
            continue
        elif key == "position_ids":
            ids = _in_rows(read.text_positions(value, text_row), key, b, s)
            row, speaks = PackedRow.from_position_ids(ids), "bounds"
        elif key == "attention_mask":
            row, speaks = _from_mask(value, b, s)
        else:
            ids = _in_rows(read.integers(value, key, dims=(1, 2)), key, b, s)
            padding_id = -1 if key == "seq_idx" else 0
            row, speaks = PackedRow.from_doc_ids(ids, padding_id=padding_id), "both"
        claims[key] = (row, speaks)
    return claims


def _are_mute(value: Any, text_row: int | None, batch: Mapping[str, Any], b: int, s: int) -> bool:
    """Say whether positions are multimodal and another key says where documents are."""
    found = read.integers(value, "position_ids", dims=(1, 2, 3))
    others = set(DOCUMENT_KEYS) - {"position_ids", "attention_mask"}
    return (
        text_row is None
        and found.ndim == 3
        and found.shape[0] not in (0, 4)
        and found.shape[1:] == (b, s)
        and any(batch.get(key) is not None for key in others)
    )


def _in_rows(ids: np.ndarray, key: str, b: int, s: int) -> np.ndarray:
    """Return `[B, S]` of what is given so, or laid end to end; batch rows end documents."""
    if ids.shape not in {(b, s), (b * s,), (1, b * s)}:
        raise PackingError(
            f"{key} has shape {ids.shape}, but the batch holds {b} x {s} = {b * s} tokens: pass "
            f"[{b}, {s}]"
        )
    return ids.reshape(b, s)


def _from_mask(value: Any, b: int, s: int) -> tuple[PackedRow, str]:
    mask = read.array(value, "attention_mask")
    if mask.ndim == 4:
        if (mask.shape[0], *mask.shape[2:]) != (b, s, s):
            raise PackingError(
                f"attention_mask has shape {mask.shape}, but a batch of [{b}, {s}] needs "
                f"[{b}, 1, {s}, {s}]"
            )
        return PackedRow.from_attention_mask(mask), "both"
    ids = _in_rows(read.integers(value, "attention_mask", dims=(1, 2)), "attention_mask", b, s)
    numbered = ids.max(initial=0) > 1
    return PackedRow.from_doc_ids(ids), "both" if numbered else "padding"


def _from_offsets(batch: Mapping[str, Any], key: str, b: int, s: int) -> PackedRow:
    padded = {p: read.offsets(batch[p], p) for p in PADDED_KEYS if batch.get(p) is not None}
    names = list(padded)
    for name in names[1:]:
        if not np.array_equal(padded[names[0]], padded[name]):
            raise PackingError(f"{names[0]} and {name} contradict each other: pass one")
    slots = padded[names[0]] if names else None
    row = PackedRow.from_cu_seqlens(batch[key], b * s, padded=slots)
    for number, (start, stop) in enumerate(row.documents):
        if start // s != (stop - 1) // s:
            raise PackingError(
                f"{key} makes document {number} rows [{start}, {stop}), across the end of batch "
                f"row {start // s} ({s} tokens): offsets count through the flattened batch, and a "
                "document lies in one batch row"
            )
    return row


def _agreed_padding(claims: Mapping[str, tuple[PackedRow, str]]) -> np.ndarray:
    """Return the real rows; keys that speak of padding must agree on them."""
    speaking = {k: row.doc_ids() > 0 for k, (row, speaks) in claims.items() if speaks != "bounds"}
    if not speaking:
        return np.ones(next(iter(claims.values()))[0].length, dtype=bool)
    (first, real), *others = speaking.items()
    for key, theirs in others:
        if (real != theirs).any():
            at = int(np.argmax(real != theirs))
            word = {True: "a document", False: "padding"}
            raise PackingError(
                f"{first} and {key} contradict each other: row {at} is {word[bool(real[at])]} by "
                f"{first} and {word[bool(theirs[at])]} by {key}. Pass one, or make them agree"
            )
    return real


def _agreed_documents(bounded: Mapping[str, PackedRow], real: np.ndarray) -> PackedRow:
    """Return the one set of documents that every key tells, padding taken out."""
    rows = {key: _without_padding(key, row, real) for key, row in bounded.items()}
    (first, row), *others = rows.items()
    for key, other in others:
        if other == row:
            continue
        pairs = enumerate(zip(row.documents, other.documents, strict=False))
        differ = next((f"document {n} is rows {p} or {q}" for n, (p, q) in pairs if p != q), "")
        raise PackingError(
            f"{first} and {key} contradict each other{': ' if differ else ''}{differ}. {first} "
            f"says {row}; {key} says {other}. Pass one, or make them agree"
        )
    return row


def _without_padding(key: str, row: PackedRow, real: np.ndarray) -> PackedRow:
    """Cut padding off the ends of documents; padding that splits one is a contradiction."""
    ids = np.where(real, row.doc_ids(), 0)
    kept = PackedRow.from_doc_ids(ids)
    present = np.unique(ids[ids > 0])
    if len(kept) != present.size:
        runs = kept.bounds[:, 0]
        split = runs[1:][ids[runs[1:]] == ids[runs[:-1]]][0]
        raise PackingError(
            f"{key} makes one document of rows that padding splits before row {split}: one "
            "document or two? Restart its positions or ids there, or unmask the padding"
        )
    return kept
