"""Pack documents into rows of equal attention work, looking a bounded way ahead."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from longpack.errors import PackingError
from longpack.packing.row import PackedRow


@dataclass(frozen=True)
class Piece:
    """Tokens `[start, stop)` of document number `doc`: a document of its own in its row."""

    doc: int
    start: int
    stop: int

    @property
    def area(self) -> int:
        """Query-key pairs of causal attention inside the piece."""
        n = self.stop - self.start
        return n * (n + 1) // 2


@dataclass(frozen=True)
class FilledRow:
    """One row: its pieces in order, then padding up to `length` (in the last rows alone)."""

    pieces: tuple[Piece, ...]
    length: int

    @property
    def documents(self) -> PackedRow:
        """Where the pieces lie."""
        used = [piece.stop - piece.start for piece in self.pieces]
        return PackedRow.from_lengths(used, padding=self.length - sum(used))

    @property
    def area(self) -> int:
        """Query-key pairs of the row."""
        return sum(piece.area for piece in self.pieces)


Step = tuple[FilledRow, ...]


def pack_in_order(lengths: Sequence[int], row_tokens: int, rows_per_step: int = 1) -> list[Step]:
    """Fill rows with documents as they come, cutting at every row's end.

    Args:
        lengths: tokens of the documents, in the order of the stream.
        row_tokens: rows of a packed row.
        rows_per_step: rows that are computed side by side, one on each dp replica.
    """
    stream = [Piece(doc, 0, length) for doc, length in enumerate(lengths) if length]
    steps = []
    for window in _windows(stream, row_tokens, rows_per_step * row_tokens):
        rows = [list(row) for row in _windows(window, row_tokens, row_tokens)]
        rows += [[] for _ in range(rows_per_step - len(rows))]
        steps.append(tuple(FilledRow(tuple(row), row_tokens) for row in rows))
    return steps


def pack_window(
    lengths: Sequence[int],
    row_tokens: int,
    rows_per_step: int = 1,
    window_steps: int = 8,
    seed: int = 0,
) -> list[Step]:
    """Fill rows so that rows side by side have equal attention work.

    Takes `window_steps` steps' worth of the stream at a time, so no document moves further than
    that. Inside a window, documents go longest first and whole to the row with least area that
    has room; what fits nowhere is cut over the rows with most room. Rows of like area form a
    step, and the steps are shuffled. Every token of the stream is in exactly one row.

    Args:
        lengths, row_tokens, rows_per_step: as in `pack_in_order`.
        window_steps: steps that are packed together; 1 keeps documents in their step.
        seed: of the order of steps inside a window.
    """
    if window_steps < 1 or rows_per_step < 1 or row_tokens < 1:
        raise PackingError(
            f"window_steps={window_steps}, rows_per_step={rows_per_step} and row_tokens="
            f"{row_tokens} must all be at least 1"
        )
    stream = [Piece(doc, 0, length) for doc, length in enumerate(lengths) if length]
    steps: list[Step] = []
    capacity = window_steps * rows_per_step * row_tokens
    for number, window in enumerate(_windows(stream, row_tokens, capacity)):
        tokens = sum(piece.stop - piece.start for piece in window)
        num_steps = -(-tokens // (rows_per_step * row_tokens))
        rows = _fill(window, row_tokens, num_steps * rows_per_step)
        rows.sort(key=lambda row: row.area)
        order = np.random.default_rng((seed, number)).permutation(num_steps)
        steps += [tuple(rows[s * rows_per_step : (s + 1) * rows_per_step]) for s in order]
    return steps


def _windows(pieces: Sequence[Piece], longest: int, capacity: int) -> Iterator[list[Piece]]:
    """Cut a stream into windows of `capacity` tokens, and pieces to at most `longest`."""
    window: list[Piece] = []
    left = capacity
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            size = min(piece.stop - start, longest, left)
            window.append(Piece(piece.doc, start, start + size))
            start, left = start + size, left - size
            if not left:
                yield window
                window, left = [], capacity
    if window:
        yield window


def _fill(pieces: list[Piece], row_tokens: int, num_rows: int) -> list[FilledRow]:
    """Place pieces longest first: least area first, cut only where no row has room."""
    rows: list[list[Piece]] = [[] for _ in range(num_rows)]
    room = [row_tokens] * num_rows
    loads = [(0, number) for number in range(num_rows)]
    uncut: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: p.start - p.stop):
        size = piece.stop - piece.start
        passed = []
        while loads and room[loads[0][1]] < size:
            passed.append(heapq.heappop(loads))
        if loads:
            area, number = heapq.heappop(loads)
            rows[number].append(piece)
            room[number] -= size
            if room[number]:
                passed.append((area + piece.area, number))
        else:
            uncut.append(piece)
        for load in passed:
            heapq.heappush(loads, load)
    for piece in uncut:
        start = piece.start
        while start < piece.stop:
            number = max(range(num_rows), key=room.__getitem__)
            size = min(piece.stop - start, room[number])
            rows[number].append(Piece(piece.doc, start, start + size))
            start, room[number] = start + size, room[number] - size
    return [FilledRow(tuple(row), row_tokens) for row in rows]
