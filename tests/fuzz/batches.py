"""Batches: valid ones in every convention and mix of conventions, and mutations of them."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tests.fuzz.oddities import anything, mutate


@dataclass
class Made:
    """A batch `[b, s]`, and whether it must be accepted."""

    batch: Any
    b: int
    s: int
    valid: bool
    text_row: Any = None


def make(rng: random.Random, max_rows: int = 3, max_tokens: int = 12) -> Made:
    """Make a batch: one in four valid, the others with one or two things wrong or odd."""
    made = valid_batch(rng, max_rows, max_tokens)
    for _ in range(rng.choice([0, 1, 1, 2])):
        made.valid = False
        _spoil(rng, made)
    if isinstance(made.batch, dict):
        tokens = made.batch.get("input_ids", made.batch.get("inputs_embeds"))
        if isinstance(tokens, torch.Tensor | np.ndarray) and not getattr(tokens, "is_nested", 0):
            made.b, made.s = (*tokens.shape, 0, 0)[:2]
    return made


def valid_batch(rng: random.Random, max_rows: int, max_tokens: int) -> Made:
    """Make a batch whose documents are said in one to three ways that agree."""
    b, s = rng.choice([1, 1, 2, max_rows]), rng.randint(1, max_tokens)
    if rng.random() < 0.02:
        b, s = rng.choice([(0, s), (b, 0), (0, 0)])
    ids = _documents(rng, b, s, padded=rng.random() < 0.6)
    ways = _ways(rng, ids, b, s)
    names = rng.sample(sorted(ways), min(len(ways), rng.choice([1, 1, 2, 3])))
    batch: dict[str, Any] = {"input_ids": torch.randint(1, 9, (b, s))}
    if rng.random() < 0.1:
        batch = {"inputs_embeds": torch.ones(b, s, 2)}
    for name in names:
        batch.update(ways[name])
    return Made(batch, b, s, valid=True, text_row=_text_row(rng, batch))


def _documents(rng: random.Random, b: int, s: int, padded: bool) -> torch.Tensor:
    """Return ids `[b, s]`, ascending from 1, 0 on padding; padding never splits a document."""
    number, rows = 0, []
    for _ in range(b):
        row: list[int] = []
        while len(row) < s:
            pads = rng.randint(1, 3) if padded and rng.random() < 0.3 else 0
            number += 1
            row += [0] * pads + [number] * rng.randint(1, max(1, s))
        rows.append(row[:s])
    return torch.tensor(rows, dtype=torch.int64).reshape(b, s)


def _ways(rng: random.Random, ids: torch.Tensor, b: int, s: int) -> dict[str, dict[str, Any]]:
    """Return every convention that can say these documents."""
    flat = ids.reshape(-1).tolist()
    where = {n: [i for i, m in enumerate(flat) if m == n] for n in dict.fromkeys(flat) if n}
    real = ids > 0
    renamed = ids * rng.choice([1, 3, 1 << 40])
    ways: dict[str, dict[str, Any]] = {
        "doc_ids": {"doc_ids": renamed},
        "seq_idx": {"seq_idx": ids - 1},
    }
    at = torch.tensor([where[n].index(i) if n else rng.choice([0, 1]) for i, n in enumerate(flat)])
    at = at.reshape(b, s)
    mask = {"attention_mask": real.to(rng.choice([torch.bool, torch.int64, torch.float32]))}
    three = torch.stack([at, at * 2, at * 0 + 7])
    positions = rng.choice([at, torch.cat([at[None], three])])
    if real.all():
        ways["positions"] = {"position_ids": positions}
    ways["positions_and_mask"] = {"position_ids": positions, **mask}
    if ids.numel() and ids.max() > 1:
        ways["indexed"] = {"attention_mask": ids}
    square = (ids[:, :, None] == ids[:, None]) & real[:, :, None]
    square = (square & torch.ones(s, s, dtype=torch.bool).tril())[:, None]
    additive = torch.zeros(b, 1, s, s).masked_fill(~square, rng.choice([-1e9, -torch.inf]))
    ways["square"] = {"attention_mask": rng.choice([square, additive, square.expand(b, 2, s, s)])}
    sizes = [len(rows) for rows in where.values()]
    ends = torch.tensor([0, *sizes]).cumsum(0).to(rng.choice([torch.int32, torch.int64]))
    key = rng.choice(["cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q"])
    other = {"cu_seqlens": "cu_seqlens", "cu_seq_lens_q": "cu_seq_lens_k"}.get(key, "cu_seqlens_k")
    starts = [rows[0] for rows in where.values()]
    if flat[: len(flat)] == [n for n in flat if n] + [0] * flat.count(0):
        ways["offsets"] = {key: ends, other: ends, "max_length_q": max(sizes, default=0)}
    if starts and starts[0] == 0:
        slots = torch.tensor([*starts, len(flat)])
        ways["slots"] = {key: ends, "cu_seqlens_padded": slots}
        if rng.random() < 0.3:
            ways["slots"]["cu_seqlens_q_padded"] = slots.int()
    return ways


def _text_row(rng: random.Random, batch: dict[str, Any]) -> int | None:
    positions = batch.get("position_ids")
    if positions is None or positions.dim() < 3:
        return None
    return rng.choice([None, 0, -4])


def _spoil(rng: random.Random, made: Made) -> None:
    batch = made.batch
    if not isinstance(batch, dict):
        return
    keys = list(batch)
    if not keys:
        return
    speaking = [k for k in keys if k not in ("input_ids", "inputs_embeds")] or keys
    kind = rng.random()
    if kind < 0.72:
        key = rng.choice(speaking)
        batch[key] = mutate(rng, batch[key])
    elif kind < 0.80:
        del batch[rng.choice(keys)]
    elif kind < 0.86:
        other = valid_batch(rng, 2, 12)  # of another shape, or other documents
        batch[key] = other.batch.get(key := rng.choice(list(other.batch)), None)
    elif kind < 0.90:
        key = rng.choice(["doc_ids", "seq_idx", "cu_seqlens_k", "cu_seqlens_q_padded"])
        batch[key] = anything(rng)
    elif kind < 0.94:
        made.text_row = rng.choice([0, 1, -1, 4, True, anything(rng)])
    elif kind < 0.97:
        batch[rng.choice([None, 3, "pixels", "\ud800"])] = anything(rng)
    else:
        made.batch = rng.choice([anything(rng), list(batch.items()), tuple(batch)])
