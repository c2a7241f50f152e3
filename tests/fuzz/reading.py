"""Read the documents of a batch by brute force: Python lists, one row after another.

Shares nothing with `longpack.packing`. What it cannot read, longpack must refuse.
"""

from typing import Any

import numpy as np
import torch

OFFSETS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k")
SLOTS = ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
KEYS = ("doc_ids", "seq_idx", *OFFSETS, "position_ids", "attention_mask")

# For each row, the document it is in by one key, or None for padding.
Numbers = list[int | None]


class UnreadableError(Exception):
    """No single reading of this batch exists."""


def lists(value: Any) -> Any:
    """Return nested lists of Python numbers."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta" or value.layout is not torch.strided or value.is_nested:
            raise UnreadableError("a tensor without readable numbers")
        return value.detach().tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [lists(v) for v in value]
    if isinstance(value, bool | int | float | complex | str | bytes) or value is None:
        return value
    if hasattr(value, "__array__") or hasattr(value, "__len__"):
        return lists(list(value))
    raise UnreadableError(f"{type(value).__name__} holds no numbers")


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, an array or nested lists, which must not be ragged."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return tuple(value.shape)
    if hasattr(value, "__array__") and hasattr(value, "__len__"):
        return np.asarray(value).shape
    nested = lists(value)
    if not isinstance(nested, list):
        return ()
    inner = {shape_of(n) for n in nested}
    if len(inner) > 1:
        raise UnreadableError("ragged")
    return (len(nested), *(inner.pop() if inner else ()))


def flat(nested: Any) -> list[Any]:
    """Return the numbers of nested lists in order."""
    return [n for part in nested for n in flat(part)] if isinstance(nested, list) else [nested]


def whole(numbers: list[Any]) -> list[int]:
    """Return integers, exactly."""
    for n in numbers:
        if isinstance(n, str | bytes) or not isinstance(n, int | float | complex | np.longdouble):
            raise UnreadableError(f"{n!r} is not a number")
        if isinstance(n, complex) or n != n or n in (float("inf"), float("-inf")) or n != int(n):
            raise UnreadableError(f"{n!r} is not an integer")
    return [int(n) for n in numbers]


def grid(value: Any, b: int, s: int) -> list[int]:
    """Return `b * s` integers given as `[b, s]`, or laid end to end."""
    nested = lists(value)
    shape = shape_of(value)
    if shape not in {(b, s), (b * s,), (1, b * s)} and not (b * s == 0 and 0 in shape):
        raise UnreadableError(f"shape {shape} in a batch of [{b}, {s}]")
    return whole(flat(nested))


def number_runs(joined: list[bool], real: list[bool]) -> Numbers:
    """Number documents: a row joins the one before it, or begins a document, or is padding."""
    numbers: Numbers = []
    number = 0
    for row, is_real in enumerate(real):
        if is_real and not (row and joined[row] and real[row - 1]):
            number += 1
        numbers.append(number if is_real else None)
    return numbers


def by_ids(ids: list[int], padding: int, s: int) -> Numbers:
    """Read an id per row; the same id in the next batch row is another document."""
    if ids and min(ids) < padding:
        raise UnreadableError("an id below the one of padding")
    real = [n != padding for n in ids]
    joined = [i > 0 and i % s != 0 and ids[i] == ids[i - 1] for i in range(len(ids))]
    return number_runs(joined, real)


def by_positions(value: Any, text_row: Any, b: int, s: int) -> Numbers:
    nested = lists(value)
    shape = shape_of(value)
    if len(shape) == 3:
        if text_row is None and shape[0] != 4:
            raise UnreadableError("no row of text positions")
        chosen = 0 if text_row is None else lists(text_row)
        if not isinstance(chosen, int | np.integer) or not -shape[0] <= chosen < shape[0]:
            raise UnreadableError("text_row out of range")
        whole(flat(nested))
        nested = nested[chosen]
    elif text_row is not None:
        raise UnreadableError("text_row of positions that have none")
    at = grid(nested, b, s)
    joined = [i > 0 and i % s != 0 and at[i] == at[i - 1] + 1 for i in range(len(at))]
    return number_runs(joined, [True] * len(at))


def is_mute(value: Any, batch: Any, b: int, s: int) -> bool:
    """Say whether positions have rows of which none counts text tokens, beside another key."""
    rows, *shape = shape_of(value) or [0]
    others = [key for key in KEYS if key not in ("position_ids", "attention_mask")]
    return (
        rows not in (0, 4) and shape == [b, s] and any(batch.get(key) is not None for key in others)
    )


def by_offsets(batch: Any, key: str, b: int, s: int) -> Numbers:
    def rising(value: Any) -> list[int]:
        nested = lists(value)
        if len(shape_of(value)) not in (1, 2):
            raise UnreadableError("offsets of another shape")
        found = whole(flat(nested))
        if not found or found[0] != 0 or found != sorted(found):
            raise UnreadableError("offsets do not rise from 0")
        return found

    ends = rising(batch[key])
    given = [rising(batch[name]) for name in SLOTS if batch.get(name) is not None]
    if any(slots != given[0] for slots in given):
        raise UnreadableError("slots contradict each other")
    slots = given[0] if given else ends
    if len(slots) != len(ends) or slots[-1] > b * s:
        raise UnreadableError("offsets do not fit the batch")
    numbers: Numbers = [None] * (b * s)
    for d in range(len(ends) - 1):
        size = ends[d + 1] - ends[d]
        if size > slots[d + 1] - slots[d]:
            raise UnreadableError("a document is longer than its slot")
        rows = range(slots[d], slots[d] + size)
        if rows and rows[0] // s != rows[-1] // s:
            raise UnreadableError("a document crosses batch rows")
        for row in rows:
            numbers[row] = d + 1
    return numbers


def by_square(nested: Any, b: int, s: int) -> Numbers:
    """Read `[b, heads, s, s]`: what each row attends says where its document begins."""
    numbers: Numbers = []
    for each in nested:
        if any(head != each[0] for head in each[1:]):
            raise UnreadableError("heads differ")
        entries = flat(each)
        booleans = all(isinstance(n, int) for n in entries)
        if not all(n in (0, 1) if booleans else n <= 0 for n in entries):
            raise UnreadableError("neither a 0/1 mask nor an additive one")
        sees = [[bool(n) if booleans else n == 0 for n in row] for row in each[0]]
        real = [sees[i][i] for i in range(s)]
        joined = [i > 0 and sees[i][i - 1] for i in range(s)]
        mine = number_runs(joined, real)
        for i in range(s):
            for j in range(s):
                if sees[i][j] != (mine[i] is not None and mine[i] == mine[j] and j <= i):
                    raise UnreadableError("not block-causal")
        shift = max((n for n in numbers if n), default=0)
        numbers += [None if n is None else n + shift for n in mine]
    return numbers


def read(batch: Any, b: int, s: int, text_row: Any = None) -> list[tuple[int, int]]:
    """Return `(start, stop)` of each document of the flattened batch."""
    speaks: dict[str, Numbers] = {}  # of padding and bounds
    bounds: dict[str, Numbers] = {}  # of bounds alone
    padding: dict[str, list[bool]] = {}
    alone = None
    for key in KEYS:
        value = batch.get(key)
        if value is None:
            continue
        if key in OFFSETS:
            speaks[key] = by_offsets(batch, key, b, s)
        elif key == "position_ids" and is_mute(value, batch, b, s) and text_row is None:
            whole(flat(lists(value)))
        elif key == "position_ids":
            bounds[key] = by_positions(value, text_row, b, s)
        elif key == "attention_mask":
            nested = lists(value)
            shape = shape_of(value)
            if len(shape) == 4:
                if (shape[0], *shape[2:]) != (b, s, s) or not shape[1]:
                    raise UnreadableError(f"mask of {shape}")
                speaks[key] = by_square(nested, b, s)
            elif max(ids := grid(value, b, s), default=0) <= 1:
                if ids and min(ids) < 0:
                    raise UnreadableError("negative mask")
                padding[key], alone = [n == 1 for n in ids], ids
            else:
                speaks[key] = by_ids(ids, 0, s)
        else:
            speaks[key] = by_ids(grid(value, b, s), -1 if key == "seq_idx" else 0, s)
    if alone is not None and not speaks and not bounds:
        for row in range(b):
            ones = "".join(map(str, alone[row * s : row * s + s]))
            if "1" in ones and "0" in ones.strip("0"):
                raise UnreadableError("a hole in the mask")
        bounds["attention_mask"] = by_ids(alone, 0, s)
    if not speaks and not bounds and not padding:
        raise UnreadableError("nothing speaks of documents")
    reals = [[n is not None for n in numbers] for numbers in speaks.values()] + [*padding.values()]
    real = reals[0] if reals else [True] * (b * s)
    if any(other != real for other in reals):
        raise UnreadableError("padding is contradicted")
    answers = {tuple(spans(numbers, real)) for numbers in (*speaks.values(), *bounds.values())}
    if len(answers) != 1:
        raise UnreadableError("documents are contradicted")
    return list(answers.pop())


def spans(numbers: Numbers, real: list[bool]) -> list[tuple[int, int]]:
    """Return the real rows of each document, which must be one run."""
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(numbers):
        if number is not None and real[row]:
            rows.setdefault(number, []).append(row)
    for mine in rows.values():
        if mine[-1] - mine[0] + 1 != len(mine):
            raise UnreadableError("padding inside a document")
    return [(mine[0], mine[-1] + 1) for mine in rows.values()]
