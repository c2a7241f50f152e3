"""PackedRow: where the documents of one packed row are."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from longpack.errors import PackingError
from longpack.packing import read


@dataclass(frozen=True)
class PackedRow:
    """The documents of one packed row, as half-open spans of rows; all else is padding.

    A document is a run of consecutive rows. Every convention that batches use (lengths, ids,
    position restarts, offsets, masks) is read into this one value; a batch of several rows is
    one row with more documents, laid end to end. Documents without a token are not listed.

    Args:
        documents: `(start, stop)` of each document, ascending, disjoint, `start < stop`.
        length: rows of the packed row, padding included, in tokens.
    """

    documents: tuple[tuple[int, int], ...]
    length: int

    def __post_init__(self) -> None:
        self._check_types()
        if not 0 <= self.length <= read.MAX_ROWS:
            raise PackingError(
                f"a row of {self.length} tokens: a row has 0 to {read.MAX_ROWS}, since kernels "
                "count rows in int32"
            )
        free = 0
        for index, (start, stop) in enumerate(self.documents):
            if not free <= start < stop <= self.length:
                raise PackingError(
                    f"document {index} covers rows [{start}, {stop}), but must start at or after "
                    f"row {free}, hold at least one row and end by row {self.length}: pass "
                    "`documents` ascending, without overlaps, inside `length`"
                )
            free = stop

    def _check_types(self) -> None:
        spans = self.documents
        pairs = isinstance(spans, tuple) and all(
            isinstance(s, tuple) and len(s) == 2 for s in spans
        )
        if not pairs or {type(n) for n in chain((self.length,), *spans)} != {int}:
            raise PackingError(
                "documents must be a tuple of (start, stop) pairs of Python ints, and length "
                f"({type(self.length).__name__}) one too: convert them, or use "
                "PackedRow.from_lengths"
            )

    @classmethod
    def from_lengths(cls, lengths: Iterable[int], padding: int = 0) -> Self:
        """Pack documents of these lengths end to end, then `padding` rows.

        Args:
            lengths: tokens of each document, at least 0 each.
            padding: padding rows at the end, at least 0.
        """
        listed = list(lengths) if isinstance(lengths, Iterator) else lengths
        sizes = read.integers(listed, "lengths", dims=(1,))
        pads = read.integer(padding, "padding")
        if sizes.min(initial=pads) < 0:
            raise PackingError(
                f"lengths {sizes[:8].tolist()} and padding {pads} must all be at least 0 tokens"
            )
        total = sum(sizes.tolist()) + pads  # as Python ints, which do not overflow
        if total > read.MAX_ROWS:
            return cls((), total)  # raises
        stops = np.cumsum(sizes)
        return cls._from_spans(stops - sizes, stops, total)

    @classmethod
    def from_doc_ids(cls, doc_ids: Any, *, padding_id: int = 0) -> Self:
        """Read documents from an id per row; a run of one id is a document.

        An id that comes back after another id is a new document: `[1, 1, 2, 1]` holds three.
        `padding_id` marks padding (0 for `doc_ids` and indexed attention masks, -1 for
        `seq_idx`, whose first document is 0).

        Args:
            doc_ids: integers `[S]` or `[B, S]` (tensor, array or list).

        Raises:
            PackingError: an id below `padding_id`, or not an integer.
        """
        ids = read.integers(doc_ids, "doc_ids", dims=(1, 2))
        padding_id = read.integer(padding_id, "padding_id")
        if ids.size and ids.min() < padding_id:
            flat = ids.reshape(-1)
            row = int(np.argmax(flat < padding_id))
            raise PackingError(
                f"doc_ids[{row}] is {flat[row]}; ids are at least {padding_id}, and "
                f"{padding_id} means padding: renumber the documents"
            )
        starts = read.batch_row_starts(ids.shape)
        starts[1:] |= np.diff(ids.reshape(-1)) != 0
        return cls._from_starts(starts, real=ids.reshape(-1) != padding_id)

    @classmethod
    def from_position_ids(cls, position_ids: Any, *, text_row: int | None = None) -> Self:
        """Read documents from positions that restart: a break wherever they do not go up by one.

        Positions alone cannot tell padding; add an attention mask for that.

        Args:
            position_ids: integers `[S]`, `[B, S]`, or multimodal `[R, B, S]` where one of the R
                rows counts text tokens.
            text_row: index of that row in `[R, B, S]`. With R = 4 it defaults to 0, the
                convention of models that put the text row first; with any other R it must be
                given, since temporal, height and width rows repeat inside a document.
        """
        ids = read.text_positions(position_ids, text_row)
        starts = read.batch_row_starts(ids.shape)
        before, after = ids.reshape(-1)[:-1], ids.reshape(-1)[1:]
        starts[1:] |= (after < before) | (after - before != 1)
        return cls._from_starts(starts, real=np.ones(starts.size, dtype=bool))

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Any, length: int | None = None, *, padded: Any = None
    ) -> Self:
        """Read documents from cumulative lengths `[0, l0, l0+l1, ...]`.

        Args:
            cu_seqlens: integers `[D+1]`, the offsets of D documents laid end to end.
            length: rows of the packed row; what lies past the last offset is padding.
                Defaults to the last offset.
            padded: integers `[D+1]`, where each document's slot starts when every document is
                padded by itself: document d holds `cu_seqlens[d+1] - cu_seqlens[d]` rows from
                `padded[d]` on, and the rest of its slot is padding.

        Raises:
            PackingError: offsets that do not start at 0 or that decrease, a document that does
                not fit its slot, an end past `length`.
        """
        offsets = read.offsets(cu_seqlens, "cu_seqlens")
        slots = offsets if padded is None else read.offsets(padded, "padded")
        sizes = np.diff(offsets)
        if slots.size != offsets.size:
            raise PackingError(
                f"padded holds {slots.size} offsets and cu_seqlens {offsets.size}: "
                "give one slot per document"
            )
        if (sizes > np.diff(slots)).any():
            d = int(np.argmax(sizes > np.diff(slots)))
            raise PackingError(
                f"document {d} has {sizes[d]} rows by cu_seqlens but its slot holds "
                f"{slots[d + 1] - slots[d]} by padded"
            )
        end = int(slots[-1])
        rows = end if length is None else read.integer(length, "length")
        if end > rows:
            raise PackingError(
                f"cu_seqlens ends at {end} but the row has {rows} tokens: these offsets belong "
                "to another batch"
            )
        return cls._from_spans(slots[:-1], slots[:-1] + sizes, rows)

    @classmethod
    def from_attention_mask(cls, attention_mask: Any) -> Self:
        """Read documents from a mask.

        Args:
            attention_mask: one of
                `[B, S]` of 0 and 1 (or bool): one document per batch row, the rest padding;
                `[B, S]` of 0, 1, 2, ...: indexed, the document of each row, 0 for padding;
                `[B, 1, S, S]` bool (True attends) or additive (0 attends): the documents of a
                block-causal mask.

        Raises:
            PackingError: a 0/1 mask with padding between two real rows (one document or two?),
                or a 4-D mask that is not block-causal.
        """
        mask = read.array(attention_mask, "attention_mask")
        if mask.ndim == 4:
            return cls._from_starts(*read.block_causal(mask))
        ids = read.integers(attention_mask, "attention_mask", dims=(2,))
        row = cls.from_doc_ids(ids)
        if ids.size == 0 or ids.max() <= 1:
            read.reject_holes(ids)
        return row

    @classmethod
    def _from_starts(cls, starts: NDArray[np.bool_], real: NDArray[np.bool_]) -> Self:
        """Build from flags per row: a document starts here; this row is not padding."""
        begins = real & starts
        begins[1:] |= real[1:] & ~real[:-1]
        begins[:1] |= real[:1]
        ends = np.ones(real.size, dtype=bool)
        ends[:-1] = starts[1:] | ~real[1:]
        return cls._from_spans(np.flatnonzero(begins), np.flatnonzero(real & ends) + 1, real.size)

    @classmethod
    def _from_spans(cls, starts: NDArray[Any], stops: NDArray[Any], length: int) -> Self:
        """Build from parallel arrays; empty spans go."""
        spans = zip(starts.tolist(), stops.tolist(), strict=True)
        return cls(tuple((a, b) for a, b in spans if a < b), int(length))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(stop - start for start, stop in self.documents)

    @property
    def tokens(self) -> int:
        """Tokens that belong to a document."""
        return sum(self.lengths)

    @property
    def area(self) -> int:
        """Query-key pairs of causal attention inside documents: the sum of L(L+1)/2."""
        return sum(n * (n + 1) // 2 for n in self.lengths)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """The documents as a read-only array `[D, 2]` of `(start, stop)`."""
        bounds = np.array(self.documents, dtype=np.int64).reshape(-1, 2)
        bounds.flags.writeable = False
        return bounds

    def doc_ids(self) -> NDArray[np.int64]:
        """The document of each row, `[length]`, counting from 1; 0 is padding."""
        ids = np.zeros(self.length, dtype=np.int64)
        for number, (start, stop) in enumerate(self.documents, 1):
            ids[start:stop] = number
        return ids

    def position_ids(self) -> NDArray[np.int64]:
        """The position of each row inside its document, `[length]`; 0 on padding."""
        positions = np.zeros(self.length, dtype=np.int64)
        for start, stop in self.documents:
            positions[start:stop] = np.arange(stop - start)
        return positions

    def cu_seqlens(self) -> NDArray[np.int64]:
        """Offsets that tile the whole row, padding runs as entries of their own.

        What recurrent layers need: state resets at every offset, and every row is covered.
        """
        edges = np.concatenate([[0], self.bounds.reshape(-1), [self.length]])
        return np.unique(edges)

    def pad_to(self, length: int) -> "PackedRow":
        """Return the same documents in a row of `length` tokens, padded at the end."""
        length = read.integer(length, "length")
        if length < self.length:
            raise PackingError(f"a row of {self.length} tokens cannot be padded to {length}")
        return self if length == self.length else PackedRow(self.documents, length)

    def __len__(self) -> int:
        return len(self.documents)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.documents)

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.lengths[:6])) + (", ..." if len(self) > 6 else "")
        padding = self.length - self.tokens
        return f"{len(self)} documents of [{shown}] tokens and {padding} padding rows"


def first_difference(rows: Sequence[PackedRow]) -> str | None:
    """Name the first place where rows differ, with the index of both; None when all agree."""
    base = rows[0]
    for index, other in enumerate(rows[1:], 1):
        if other == base:
            continue
        for number, (ours, theirs) in enumerate(zip(base.documents, other.documents, strict=False)):
            if ours != theirs:
                return f"document {number} covers rows {ours} on 0 and {theirs} on {index}"
        return (
            f"0 has {len(base)} documents in {base.length} rows and "
            f"{index} has {len(other)} in {other.length}"
        )
    return None
