"""Read what batches carry (tensors, arrays, lists) into checked integer arrays.

Tensors are taken by duck typing, so that documents and plans need no torch.
"""

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longpack.errors import PackingError

MAX_ROWS = 2**31 - 1  # kernels count rows in int32; the area of more would pass int64


def array(value: Any, name: str) -> NDArray[Any]:
    """Return a host array of real numbers; a tensor on a device is copied to the host."""
    try:
        if hasattr(value, "detach"):
            value = value.detach()
            if str(value.dtype) == "torch.bfloat16":  # numpy has no bfloat16
                value = value.float()
            value = value.cpu().numpy()
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # meta, sparse, nested, ragged
        raise PackingError(f"{name} cannot be read as an array of numbers: {error}") from None
    if found.dtype.kind not in "biuf" or np.ma.is_masked(value):
        held = "masked entries" if np.ma.is_masked(value) else f"{found.dtype}"
        raise PackingError(f"{name} ({type(value).__name__}) holds {held}; it must hold integers")
    return found


def integers(value: Any, name: str, dims: tuple[int, ...]) -> NDArray[np.int64]:
    """Return int64, refusing what is not exact, and shapes that are not of `dims` dimensions."""
    found = array(value, name)
    if found.ndim not in dims:
        wanted = " or ".join(f"{d}-D" for d in dims)
        raise PackingError(f"{name} has shape {tuple(found.shape)}; it must be {wanted}")
    if found.dtype.kind == "f" and found.size:
        _check_floats(found, name, low="bfloat16" in str(getattr(value, "dtype", "")))
    if found.dtype == np.uint64 and (found > np.iinfo(np.int64).max).any():
        raise PackingError(f"{name} holds {found.max()}, which int64 cannot: renumber it")
    return found.astype(np.int64)


def _check_floats(found: NDArray[Any], name: str, low: bool) -> None:
    """Refuse fractions, and numbers so large that their dtype leaves integers out."""
    exact = 256 if low else 2 / np.finfo(found.dtype).eps
    if not (np.abs(found) < exact).all():
        at = found.reshape(-1)[int(np.argmin(np.abs(found) < exact))]
        dtype = "bfloat16" if low else found.dtype
        raise PackingError(
            f"{name} holds {at} in {dtype}, which tells integers apart below {exact:.0f} only: "
            "pass integers, and keep them out of casts to low precision"
        )
    if (found != np.round(found)).any():
        raise PackingError(f"{name} holds fractions ({found.dtype}); it must hold integers")


def integer(value: Any, name: str) -> int:
    """Return one Python int, in the range of int64."""
    try:
        if getattr(value, "ndim", 0):
            raise TypeError
        found = operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor may be meta, or hold several
        shown = value if isinstance(value, float | str) else type(value).__name__
        raise PackingError(f"{name}={shown!r} must be one integer") from None
    if not -(2**63) <= found < 2**63:
        raise PackingError(f"{name} has {found.bit_length()} bits; it must be an int64")
    return found


def offsets(value: Any, name: str) -> NDArray[np.int64]:
    """Return cumulative offsets, checked to start at 0 and never to decrease."""
    found = integers(value, name, dims=(1, 2)).reshape(-1)
    if found.size == 0 or found[0] != 0:
        raise PackingError(
            f"{name} starts with {found[:1].tolist()}; the first of the D+1 offsets must be 0"
        )
    falls = found[1:] < found[:-1]
    if falls.any():
        at = int(np.argmax(falls))
        raise PackingError(
            f"{name} decreases from {found[at]} to {found[at + 1]} at entry {at + 1}; "
            "offsets of documents laid end to end never do"
        )
    return found


def text_positions(value: Any, text_row: int | None) -> NDArray[np.int64]:
    """Return the `[S]` or `[B, S]` positions that count text tokens."""
    found = integers(value, "position_ids", dims=(1, 2, 3))
    if found.ndim < 3:
        if text_row is not None:
            raise PackingError(
                f"text_row={text_row} was given but position_ids is {found.ndim}-D "
                f"{found.shape}: it names a row of [R, B, S]"
            )
        return found
    rows = found.shape[0]
    if text_row is None and rows != 4:
        raise PackingError(
            f"position_ids has shape {found.shape}: of its {rows} rows none is known to count "
            "text tokens, and image rows repeat inside a document. Pass text_row=, or doc_ids "
            "or cu_seq_lens_q in the batch"
        )
    chosen = 0 if text_row is None else integer(text_row, "text_row")
    if not -rows <= chosen < rows:
        raise PackingError(f"text_row={chosen} but position_ids has {rows} rows")
    return found[chosen]


def batch_row_starts(shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return a flag per flattened row: a batch row, hence a document, starts here."""
    starts = np.zeros(int(np.prod(shape)), dtype=bool)
    if starts.size:
        starts[:: shape[-1]] = True
    return starts


def reject_holes(mask: NDArray[np.int64]) -> None:
    """Refuse a 0/1 mask whose real rows are not one run in each batch row."""
    for b, row in enumerate(mask):
        real = np.flatnonzero(row)
        if real.size and real[-1] - real[0] + 1 != real.size:
            hole = int(real[np.argmax(np.diff(real) > 1)]) + 1
            raise PackingError(
                f"attention_mask[{b}] is 0 at row {hole}, between rows that are 1: a 0/1 mask "
                "does not say whether that is one document or two. Pass doc_ids, or number the "
                "documents in the mask"
            )


def block_causal(mask: NDArray[Any]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return (starts, real) flags per flattened row of a `[B, 1, S, S]` block-causal mask."""
    additive = mask.dtype.kind == "f"
    if not ((mask <= 0) if additive else (mask >= 0) & (mask <= 1)).all():
        held = "at most 0 (0 attends)" if additive else "0 or 1 (1 attends)"
        raise PackingError(f"attention_mask is {mask.dtype}, so its entries must be {held}")
    allowed = mask == 0 if additive else mask.astype(bool)
    batch, heads, rows, columns = allowed.shape
    if rows != columns or not heads or (allowed != allowed[:, :1]).any():
        raise PackingError(
            f"attention_mask has shape {mask.shape}; a block-causal mask is [B, 1, S, S], equal "
            "for every head"
        )
    allowed = allowed[:, 0]
    if not batch * rows:
        return np.zeros(0, dtype=bool), np.zeros(0, dtype=bool)
    real = np.einsum("bii->bi", allowed)
    first = np.where(real, allowed.argmax(axis=2), np.arange(rows))
    column = np.arange(columns)
    expected = (
        real[:, :, None] & (column >= first[:, :, None]) & (column <= np.arange(rows)[:, None])
    )
    wrong = allowed != expected
    # a row's document starts at a row of its own, and never before an earlier row's
    strays = np.take_along_axis(first, first, axis=1) != first
    strays |= real & ~np.take_along_axis(real, first, axis=1)
    strays[:, 1:] |= np.diff(first, axis=1) < 0
    wrong |= strays[:, :, None]
    if wrong.any():
        b, i = (int(n) for n in np.argwhere(wrong.any(axis=2))[0])
        raise PackingError(
            f"attention_mask[{b}, 0, {i}] is not block-causal: row {i} must attend to every row "
            f"from its document's first through itself and to no other. longpack attends causally "
            "inside documents only"
        )
    starts = (first == np.arange(rows)) | ~real
    return starts.reshape(-1), real.reshape(-1).copy()
