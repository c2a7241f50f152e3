"""Packed rows that break things: the dangerous ones by name, and a hypothesis strategy."""

from hypothesis import strategies as st

from longpack.packing import PackedRow

DANGEROUS_ROWS: dict[str, PackedRow] = {
    "straddle": PackedRow.from_lengths([5, 3, 9, 2, 13]),
    "single_document": PackedRow.from_lengths([24]),
    "one_token_documents": PackedRow.from_lengths([1] * 11),
    "all_padding_rank": PackedRow.from_lengths([12], padding=14),
    "only_padding": PackedRow.from_lengths([], padding=6),
    "padding_inside": PackedRow.from_doc_ids([1, 1, 1, 0, 2, 2, 0, 0]),
    "padding_left": PackedRow.from_doc_ids([0, 0, 1, 1, 1, 2, 2, 2]),
    "more_ranks_than_tokens": PackedRow.from_lengths([2]),
    "one_token": PackedRow.from_lengths([1]),
    "empty_document": PackedRow.from_lengths([3, 0, 4]),
    "id_comes_back": PackedRow.from_doc_ids([1, 1, 2, 2, 1, 1, 3, 3]),
    "uneven": PackedRow.from_lengths([7, 10, 1, 1, 6]),
}


@st.composite
def packed_rows(draw: st.DrawFn, max_documents: int = 8, max_tokens: int = 80) -> PackedRow:
    """Draw a packed row: documents of any length, padding before, between and after.

    Args:
        draw: given by hypothesis.
        max_documents: most documents in the row.
        max_tokens: most rows of one document.
    """
    parts = draw(
        st.lists(st.tuples(st.integers(1, max_tokens), st.integers(0, 5)), max_size=max_documents)
    )
    at = draw(st.integers(0, 3))
    documents = []
    for length, gap in parts:
        documents.append((at, at + length))
        at += length + gap
    return PackedRow(tuple(documents), at)
