"""Batches that the doctor makes: to run on, and changed in one place to see what moves."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longpack.errors import UnsupportedError
from longpack.loss import IGNORE, next_token_targets
from longpack.packing import (
    DOCUMENT_KEYS,
    LENGTH_KEYS,
    PADDED_KEYS,
    PRIMARY,
    PackedRow,
    batch_shape,
)

Batch = Mapping[str, Any]

# A document of one token, documents that straddle the shards of 2 to 4 ranks, and padding.
LENGTHS, PADDING = (37, 1, 24, 50, 16), 8
SOURCES = ("heapq", "textwrap", "bisect", "graphlib", "shlex")  # of the standard library


def random_batch(vocab_size: int, seed: int = 0) -> Batch:
    """Return a row of documents of random tokens, 1 in 10 without a label."""
    row = PackedRow.from_lengths(LENGTHS, PADDING)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(min(3, vocab_size - 1), vocab_size, (row.length,), generator=generator)
    return _batch(ids, row, torch.rand(row.length, generator=generator) < 0.1)


def text_batch(encode: Callable[[str], list[int]], paths: Sequence[Path] = ()) -> Batch:
    """Return a row of the beginnings of real documents: files, or the standard library's sources.

    Args:
        encode: text to token ids.
        paths: text files; at most as many as there are documents in the row are read.
    """
    texts = [path.read_text(encoding="utf-8") for path in (*paths,)[: len(LENGTHS)] or _sources()]
    pieces = [encode(text)[:length] for text, length in zip(texts, LENGTHS, strict=False)]
    row = PackedRow.from_lengths([len(piece) for piece in pieces], PADDING)
    ids = torch.zeros(row.length, dtype=torch.long)
    ids[: row.tokens] = torch.tensor([token for piece in pieces for token in piece])
    return _batch(ids, row, torch.zeros(row.length, dtype=torch.bool))


def whole_targets(batch: Batch, row: PackedRow) -> torch.Tensor:
    """Return the targets of the whole row `[S]`, from `labels` or `shift_labels`.

    Raises:
        UnsupportedError: the batch has neither.
    """
    if batch.get("shift_labels") is not None:
        return batch["shift_labels"].flatten()
    if batch.get("labels") is None:
        raise UnsupportedError(
            f"the batch (keys: {sorted(batch)}) has no labels, so there is no loss to verify: add "
            "labels [B, S], which for a language model are the input_ids, -100 on padding"
        )
    return next_token_targets(batch["labels"].flatten(), row)


def document_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Return one document alone, as a batch of its own."""
    picked = _pick(batch, torch.arange(start, stop))
    return {**picked, "doc_ids": torch.ones(1, stop - start, dtype=torch.long)}


def change_document(batch: Batch, start: int, stop: int) -> Batch:
    """Return the batch with every token of rows [start, stop) exchanged for another one."""
    key = "input_ids" if batch.get("input_ids") is not None else "inputs_embeds"
    whole = batch[key].clone()
    rows = whole.flatten(0, 1)
    if key == "inputs_embeds":
        rows[start:stop] = rows[start:stop].flip(-1)
    else:  # the next of the tokens that occur, so that every id is valid
        known = torch.unique(whole)
        known = known if len(known) > 1 else known.new_tensor([0, 1])
        rows[start:stop] = known[(torch.searchsorted(known, rows[start:stop]) + 1) % len(known)]
    return {**batch, key: rows.view_as(whole)}


def reverse_documents(batch: Batch, row: PackedRow) -> Batch:
    """Return the same documents in reverse order, as one batch row: another plan."""
    spans = row.documents[::-1]
    kept = torch.zeros(row.length, dtype=torch.bool)
    pieces = [torch.arange(start, stop) for start, stop in spans]
    for piece in pieces:
        kept[piece] = True
    order = torch.cat([*pieces, (~kept).nonzero()[:, 0]])
    picked = dict(_pick(batch, order))
    ends = torch.tensor(row.lengths[::-1]).cumsum(0)
    number = torch.searchsorted(ends, torch.arange(row.length), right=True)
    documents = torch.where(number < len(row), number + 1, 0)
    picked["doc_ids"] = documents[None]
    return picked


def without_labels(batch: Batch, kept: torch.Tensor, row: PackedRow) -> Batch:
    """Return the batch with targets only on the rows where `kept` `[S]` is True."""
    targets = whole_targets(batch, row)
    shape = batch_shape(batch)
    if batch.get("shift_labels") is not None:
        return {**batch, "shift_labels": targets.where(kept, IGNORE).view(shape)}
    labels = batch["labels"].flatten().clone()
    labels[1:] = labels[1:].where(kept[:-1], IGNORE)
    return {**batch, "labels": labels.view(shape)}


def _batch(ids: torch.Tensor, row: PackedRow, unlabelled: torch.Tensor) -> Batch:
    doc_ids = torch.from_numpy(row.doc_ids())
    ids = ids.where(doc_ids > 0, 0)
    labels = ids.masked_fill(unlabelled | (doc_ids == 0), IGNORE)
    return {"input_ids": ids[None], "labels": labels[None], "doc_ids": doc_ids[None]}


def _pick(batch: Batch, rows: torch.Tensor) -> Batch:
    """Return rows of everything that has rows; what says where documents are is left out."""
    b, s = batch_shape(batch)
    dropped = {*DOCUMENT_KEYS, *PADDED_KEYS, *LENGTH_KEYS} - {"position_ids"}
    picked = {}
    for key, value in batch.items():
        if key in dropped or value is None:
            continue
        if key == "position_ids" and value.dim() == 3:  # [R, B, S] of multimodal rotary models
            picked[key] = value.flatten(1)[:, rows][:, None]
        elif key in PRIMARY or tuple(value.shape[:2]) == (b, s):
            picked[key] = value.flatten(0, 1)[rows][None]
        else:
            picked[key] = value
    return picked


def _sources() -> Iterator[Path]:
    for name in SOURCES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin)
