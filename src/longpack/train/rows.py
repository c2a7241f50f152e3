"""From documents to packed rows: filled in order, no token dropped, none repeated."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longpack.packing import PackedRow
from longpack.train.documents import Corpus
from longpack.train.tokenizer import Tokenizer


@dataclass(frozen=True)
class Cursor:
    """Where the next row begins: all the state that the data needs to go on.

    Args:
        epoch: passes over the corpus that are done.
        position: documents of this pass that are done.
        token: tokens of the next document that are done.
    """

    epoch: int = 0
    position: int = 0
    token: int = 0


@dataclass(frozen=True)
class Row:
    """One packed row.

    Args:
        tokens: int64 ids `[row_length]`.
        documents: where each document, or piece of one, lies.
    """

    tokens: np.ndarray
    documents: PackedRow

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted: all but the first of each document."""
        return self.documents.tokens - len(self.documents)


class RowPacker:
    """Packs a corpus, pass after pass, into full rows.

    Documents follow each other in the order of `Corpus.order`, each ended by the tokenizer's
    end-of-sequence token. What does not fit into a row, or is longer than `document_length`, goes
    on as a document of its own. Rows are a pure function of the cursor: every rank makes the
    same ones, over any number of ranks.

    Args:
        corpus: the documents.
        tokenizer: its ids fill the rows.
        row_length: tokens of a row.
        document_length: longest piece, in tokens.
        seed: of the order of documents.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        row_length: int,
        document_length: int,
        seed: int,
    ) -> None:
        self._corpus, self._tokenizer = corpus, tokenizer
        self._row_length, self._document_length = row_length, document_length
        # A long document fills several rows; it is tokenised once.
        self._tokens = lru_cache(maxsize=4)(self._tokenise)
        self._order = lru_cache(maxsize=2)(lambda epoch: corpus.order(seed, epoch))

    def row(self, cursor: Cursor) -> tuple[Row, Cursor]:
        """Return the row that begins at a cursor, and the cursor after it."""
        free, pieces = self._row_length, []
        while free:
            tokens = self._tokens(int(self._order(cursor.epoch)[cursor.position]))
            piece = tokens[cursor.token :][: min(free, self._document_length)]
            pieces.append(piece)
            free -= len(piece)
            cursor = self._advance(cursor, len(piece), len(tokens))
        documents = PackedRow.from_lengths(len(piece) for piece in pieces)
        return Row(np.concatenate(pieces), documents), cursor

    def rows(self, cursor: Cursor, count: int) -> tuple[list[Row], Cursor]:
        """Return the next `count` rows, and the cursor after them."""
        made = []
        for _ in range(count):
            row, cursor = self.row(cursor)
            made.append(row)
        return made, cursor

    def _advance(self, cursor: Cursor, taken: int, length: int) -> Cursor:
        if cursor.token + taken < length:
            return Cursor(cursor.epoch, cursor.position, cursor.token + taken)
        if cursor.position + 1 < len(self._corpus):
            return Cursor(cursor.epoch, cursor.position + 1)
        return Cursor(cursor.epoch + 1)

    def _tokenise(self, document: int) -> np.ndarray:
        ids = self._tokenizer.encode(self._corpus.text(document))
        return np.array([*ids, self._tokenizer.eos_id], dtype=np.int64)
