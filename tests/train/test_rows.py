"""Packing: every token of every document, once, in order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longpack.train.rows import Cursor, RowPacker
from longpack.train.tokenizer import Tokenizer, load_tokenizer

EOS = 0


class Texts:
    """A corpus of given texts, in their own order."""

    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def text(self, index):
        return self.texts[index]

    def order(self, seed, epoch):
        return np.random.default_rng((seed, epoch)).permutation(len(self.texts))


def packer_of(lengths, row_length, document_length, seed=0):
    """Document d of n characters becomes n tokens that say which document and where."""
    texts = [f"{d} {n}" for d, n in enumerate(lengths)]

    def encode(text):
        d, n = map(int, text.split())
        return [d * 1000 + i + 1 for i in range(n)]

    tokenizer = Tokenizer("test", encode, str, EOS, 10**6)
    return RowPacker(Texts(texts), tokenizer, row_length, document_length, seed), encode


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=7),
    row_length=st.integers(2, 30),
    document_length=st.integers(2, 30),
    seed=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_every_token_once_and_in_order(lengths, row_length, document_length, seed):
    packer, encode = packer_of(lengths, row_length, document_length, seed)
    cursor, stream, pieces = Cursor(), [], []
    while cursor.epoch < 2:
        row, cursor = packer.row(cursor)
        assert row.tokens.shape == (row_length,)
        assert row.documents.tokens == row.documents.length == row_length
        assert row.num_targets == row_length - len(row.documents)
        stream += row.tokens.tolist()
        pieces += [row.tokens[a:b].tolist() for a, b in row.documents]
    expected = []
    for epoch in range(cursor.epoch + 1):
        for d in np.random.default_rng((seed, epoch)).permutation(len(lengths)):
            expected += [*encode(f"{d} {lengths[d]}"), EOS]
    assert stream == expected[: len(stream)]
    assert len(stream) >= 2 * (sum(lengths) + len(lengths))
    assert all(1 <= len(piece) <= document_length for piece in pieces)
    for piece in pieces:  # one document each, and nothing after its end
        assert EOS not in piece[:-1]
        assert len({token // 1000 for token in piece if token != EOS}) <= 1


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5), stop=st.integers(0, 8))
@settings(max_examples=50, deadline=None)
def test_a_cursor_goes_on_where_it_was_taken(lengths, stop):
    packer, _ = packer_of(lengths, 13, 9)
    rows, _ = packer.rows(Cursor(), 10)
    _, cursor = packer.rows(Cursor(), stop)
    fresh, _ = packer_of(lengths, 13, 9)
    again, _ = fresh.rows(cursor, 10 - stop)
    for ours, theirs in zip(again, rows[stop:], strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.documents == theirs.documents


@pytest.mark.parametrize("text", ["def f():\n    return 'é∂😀\x00'\r\n", "<eos> <|endoftext|>", ""])
def test_the_byte_tokenizer_is_one_token_a_byte(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < tokenizer.eos_id == 256
    assert tokenizer.vocab_size == 257
