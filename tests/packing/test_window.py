"""Packing with a window: every token once, nothing far from its place, rows alike in a step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longpack.errors import PackingError
from longpack.packing.window import FilledRow, Piece, pack_in_order, pack_window

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


def tokens_of(steps):
    """(document, token) of every token, in the order of the rows."""
    return [
        (piece.doc, token)
        for step in steps
        for row in step
        for piece in row.pieces
        for token in range(piece.start, piece.stop)
    ]


def check_rows(steps, lengths, row_tokens, rows_per_step):
    """Every token of the stream once; rows full but for the last step of the stream."""
    everything = [(doc, token) for doc, n in enumerate(lengths) for token in range(n)]
    assert sorted(tokens_of(steps)) == everything
    assert all(len(step) == rows_per_step for step in steps)
    assert len(steps) == -(-sum(lengths) // (row_tokens * rows_per_step))
    for step in steps:
        for row in step:
            documents = row.documents
            assert documents.length == row_tokens
            assert documents.tokens == sum(p.stop - p.start for p in row.pieces)
            assert documents.area == row.area


@given(LENGTHS, st.integers(1, 30), st.integers(1, 3))
def test_in_order_drops_and_repeats_nothing(lengths, row_tokens, rows_per_step):
    steps = pack_in_order(lengths, row_tokens, rows_per_step)
    check_rows(steps, lengths, row_tokens, rows_per_step)
    assert tokens_of(steps) == sorted(tokens_of(steps))


@given(LENGTHS, st.integers(1, 30), st.integers(1, 3), st.integers(1, 4))
def test_window_drops_and_repeats_nothing(lengths, row_tokens, rows_per_step, window_steps):
    steps = pack_window(lengths, row_tokens, rows_per_step, window_steps)
    check_rows(steps, lengths, row_tokens, rows_per_step)


@given(LENGTHS, st.integers(1, 30), st.integers(1, 3), st.integers(1, 4))
def test_no_token_leaves_its_window(lengths, row_tokens, rows_per_step, window_steps):
    steps = pack_window(lengths, row_tokens, rows_per_step, window_steps)
    place = {token: i for i, token in enumerate(sorted(tokens_of(steps)))}
    for number, step in enumerate(steps):
        for token in tokens_of([step]):
            in_order = place[token] // (row_tokens * rows_per_step)
            assert in_order // window_steps == number // window_steps


def heavy_tailed(seed):
    lengths = np.random.default_rng(seed).pareto(1.0, 2000) * 200 + 1
    return lengths.astype(int).clip(1, 8192).tolist()


def waiting(steps):
    """Area of the heaviest row of each step over the mean of the step's rows: what idles."""
    heaviest = sum(max(row.area for row in step) for step in steps)
    return heaviest * len(steps[0]) / sum(row.area for step in steps for row in step)


def cut_documents(steps):
    pieces = [piece.doc for step in steps for row in step for piece in row.pieces]
    return len(pieces) - len(set(pieces))


@pytest.mark.parametrize("seed", range(3))
def test_replicas_wait_less_and_fewer_documents_are_cut(seed):
    lengths = heavy_tailed(seed)
    in_order = pack_in_order(lengths, 8192, 4)
    window = pack_window(lengths, 8192, 4, window_steps=8)
    assert waiting(in_order) > 1.5
    assert waiting(window) < 1.15
    assert cut_documents(window) < cut_documents(in_order) / 2


def test_documents_that_fit_are_whole():
    [step] = pack_window([60, 40, 30, 30, 25, 15], 100, 2, window_steps=1)
    assert all(piece.start == 0 for row in step for piece in row.pieces)
    assert sorted(sum(p.stop for p in row.pieces) for row in step) == [100, 100]


def test_the_order_is_a_function_of_the_seed():
    lengths = heavy_tailed(5)
    one, same, other = (pack_window(lengths, 8192, 2, seed=s) for s in (0, 0, 1))
    assert one == same != other
    assert sorted(map(repr, one)) == sorted(map(repr, other))


def test_padding_ends_the_last_row():
    [[row]] = pack_in_order([3], 5)
    assert row == FilledRow((Piece(0, 0, 3),), 5)
    assert (row.documents.tokens, row.documents.length) == (3, 5)


def test_nothing_below_one():
    with pytest.raises(PackingError, match="window_steps=0"):
        pack_window([1], 4, 1, 0)
