"""PackedRow: every convention gives the same documents, and contradictions are named."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longpack import PackedRow
from longpack.errors import PackingError
from longpack.packing import first_difference, read_documents
from longpack.testing import packed_rows


def test_padding_inside_and_at_the_left():
    inside = PackedRow.from_doc_ids([1, 1, 1, 0, 2, 2, 0, 0])
    assert inside.documents == ((0, 3), (4, 6))
    assert inside.doc_ids().tolist() == [1, 1, 1, 0, 2, 2, 0, 0]
    left = PackedRow.from_doc_ids([0, 0, 1, 1, 1, 2, 2, 2])
    assert left.documents == ((2, 5), (5, 8))


def test_an_id_that_comes_back_is_a_new_document():
    assert PackedRow.from_doc_ids([1, 1, 2, 2, 1, 1, 3, 3]).lengths == (2, 2, 2, 2)


def test_batch_rows_are_more_documents():
    row = PackedRow.from_doc_ids(torch.tensor([[1, 1, 2, 2], [2, 2, 2, 0]]))
    assert row.documents == ((0, 2), (2, 4), (4, 7))
    assert row.length == 8


def test_empty_documents_are_not_listed():
    assert PackedRow.from_lengths([3, 0, 4]).lengths == (3, 4)
    assert PackedRow.from_cu_seqlens([0, 3, 3, 7, 7], 9).documents == ((0, 3), (3, 7))


def test_positions_restart():
    assert PackedRow.from_position_ids([0, 1, 2, 3, 0, 1, 2, 3]).lengths == (4, 4)
    assert PackedRow.from_position_ids([[5, 6, 7, 2, 3]]).lengths == (3, 2)  # any start
    assert PackedRow.from_position_ids([[0, 1], [2, 3]]).lengths == (2, 2)  # batch rows


def test_multimodal_positions_need_a_text_row():
    text = torch.tensor([[0, 1, 2, 3, 0, 1]])
    image = torch.tensor([[0, 1, 1, 1, 0, 1]])
    assert PackedRow.from_position_ids(torch.stack([text, image, image, image])).lengths == (4, 2)
    three = torch.stack([image, image, text])
    with pytest.raises(PackingError, match="of its 3 rows none is known to count text"):
        PackedRow.from_position_ids(three)
    assert PackedRow.from_position_ids(three, text_row=2).lengths == (4, 2)
    with pytest.raises(PackingError, match="text_row=5 but position_ids has 3 rows"):
        PackedRow.from_position_ids(three, text_row=5)
    with pytest.raises(PackingError, match="2-D"):
        PackedRow.from_position_ids(text, text_row=0)


def test_offsets_with_padded_slots():
    row = PackedRow.from_cu_seqlens([0, 3, 5], padded=[0, 4, 8])
    assert row.documents == ((0, 3), (4, 6))
    assert row.length == 8


@pytest.mark.parametrize(
    ("offsets", "length", "padded", "said"),
    [
        ([1, 3], None, None, r"starts with \[1\].*must be 0"),
        ([], None, None, "must be 0"),
        ([0, 5, 3], None, None, "decreases from 5 to 3 at entry 2"),
        ([0, 5], 4, None, "ends at 5 but the row has 4 tokens"),
        ([0, 5], None, [0, 4], "document 0 has 5 rows by cu_seqlens but its slot holds 4"),
        ([0, 5], None, [0, 4, 8], "padded holds 3 offsets and cu_seqlens 2"),
        ([0, 2.5], None, None, "fractions"),
    ],
)
def test_bad_offsets_say_what_is_wrong(offsets, length, padded, said):
    with pytest.raises(PackingError, match=said):
        PackedRow.from_cu_seqlens(offsets, length, padded=padded)


def test_bad_ids_say_what_is_wrong():
    with pytest.raises(PackingError, match=r"doc_ids\[2\] is -1"):
        PackedRow.from_doc_ids([1, 1, -1])
    with pytest.raises(PackingError, match="fractions"):
        PackedRow.from_doc_ids([0.5, 1.0])
    with pytest.raises(PackingError, match=r"shape \(1, 1, 2\)"):
        PackedRow.from_doc_ids([[[1, 1]]])
    with pytest.raises(PackingError, match="at least 0"):
        PackedRow.from_lengths([3, -1])
    with pytest.raises(PackingError, match="document 1 covers rows"):
        PackedRow(((0, 3), (2, 5)), 5)


def block_causal(lengths, padding=0):
    row = PackedRow.from_lengths(lengths, padding)
    ids = torch.from_numpy(row.doc_ids())
    mask = (ids[:, None] == ids[None]) & (ids[:, None] > 0)
    return mask.tril()[None, None]


def test_a_block_causal_mask_is_two_documents():
    mask = block_causal([4, 4])
    additive = torch.zeros(1, 1, 8, 8).masked_fill(~mask, torch.finfo(torch.bfloat16).min)
    for given_mask in (mask, additive, additive.bfloat16(), mask.long(), mask.expand(1, 3, 8, 8)):
        assert PackedRow.from_attention_mask(given_mask).documents == ((0, 4), (4, 8))
    assert PackedRow.from_attention_mask(block_causal([3, 2], 3)).documents == ((0, 3), (3, 5))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: m.masked_fill_(torch.ones(8, 8, dtype=torch.bool), True),  # not causal
        lambda m: m[0, 0].__setitem__((6, 1), True),  # reaches into another document
        lambda m: m[0, 0].__setitem__((6, 5), False),  # a hole in the past (a window)
        lambda m: m[0, 0].__setitem__((5, slice(0, 5)), True),  # one row reaches back, others not
    ],
)
def test_a_mask_that_is_not_block_causal_is_refused(spoil):
    mask = block_causal([4, 4])
    spoil(mask)
    with pytest.raises(PackingError, match="not block-causal"):
        PackedRow.from_attention_mask(mask)


def test_a_document_cannot_start_at_a_row_of_padding():
    """Row 0 attends to nothing, so it is padding, yet rows 1 to 3 attend to it."""
    mask = block_causal([4, 4])
    mask[0, 0, 0, 0] = False
    with pytest.raises(PackingError, match=r"mask\[0, 0, 1\] is not block-causal"):
        PackedRow.from_attention_mask(mask)


@pytest.mark.parametrize("text_row", [[0], np.array([0]), 0.0])
def test_a_text_row_is_one_integer(text_row):
    with pytest.raises(PackingError, match="must be one integer"):
        PackedRow.from_position_ids(np.zeros((4, 1, 3), dtype=int), text_row=text_row)


def test_masks_of_two_dimensions():
    assert PackedRow.from_attention_mask([[1, 1, 1, 0], [0, 1, 1, 1]]).documents == ((0, 3), (5, 8))
    assert PackedRow.from_attention_mask([[1, 1, 2, 0, 2, 3]]).lengths == (2, 1, 1, 1)
    with pytest.raises(PackingError, match=r"attention_mask\[0\] is 0 at row 2"):
        PackedRow.from_attention_mask([[1, 1, 0, 1]])


@given(packed_rows())
def test_ids_and_offsets_round_trip(row):
    assert PackedRow.from_doc_ids(row.doc_ids()) == row
    ids = row.doc_ids()
    assert row.tokens == (ids > 0).sum()
    assert row.area == sum(n * (n + 1) // 2 for n in row.lengths)
    for start, stop in row.documents:
        assert row.position_ids()[start:stop].tolist() == list(range(stop - start))
    tiles = row.cu_seqlens()
    assert tiles[0] == 0
    assert tiles[-1] == row.length
    assert all(len(set(ids[a:b])) == 1 for a, b in itertools.pairwise(tiles))


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 5))
def test_every_convention_tells_the_same_documents(lengths, padding):
    row = PackedRow.from_lengths(lengths, padding)
    batch = {
        "input_ids": np.zeros((1, row.length)),
        "doc_ids": row.doc_ids()[None],
        "seq_idx": row.doc_ids()[None] - 1,
        "position_ids": row.position_ids()[None],
        "cu_seq_lens_q": np.cumsum([0, *lengths]),
        "attention_mask": row.doc_ids()[None],
    }
    assert read_documents(batch) == row
    if row.length:
        batch["attention_mask"] = block_causal(lengths, padding)
        assert read_documents(batch) == row


def batch(**keys):
    return {"input_ids": torch.zeros(1, 8, dtype=torch.long), **keys}


def test_contradicting_conventions_name_both():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(PackingError, match=r"cu_seq_lens_q and position_ids.*3 documents.*2 doc"):
        read_documents(batch(position_ids=positions, cu_seq_lens_q=torch.tensor([0, 2, 4, 8])))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]])
    with pytest.raises(PackingError, match=r"doc_ids and attention_mask.*row 7 is a document by"):
        read_documents(batch(doc_ids=torch.ones(1, 8).long(), attention_mask=mask))
    with pytest.raises(PackingError, match="cu_seq_lens_q and cu_seq_lens_k"):
        read_documents(
            batch(cu_seq_lens_q=torch.tensor([0, 4, 8]), cu_seq_lens_k=torch.tensor([0, 3, 8]))
        )


def test_a_validity_mask_adds_padding_to_boundaries():
    positions = torch.tensor([[0, 1, 2, 1, 0, 1, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 0, 0]])
    row = read_documents(batch(position_ids=positions, attention_mask=mask))
    assert row.documents == ((0, 3), (4, 6))
    ones = torch.ones(1, 8)
    restart = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    assert read_documents(batch(position_ids=restart, attention_mask=ones)).lengths == (4, 4)
    with pytest.raises(PackingError, match="padding splits before row 4: one document or two"):
        read_documents(batch(position_ids=torch.arange(8)[None], attention_mask=mask))


def test_batches_that_say_nothing_or_too_much():
    with pytest.raises(PackingError, match="does not say where its documents are"):
        read_documents(batch())
    with pytest.raises(PackingError, match="both of input_ids and inputs_embeds"):
        read_documents(batch(inputs_embeds=torch.zeros(1, 8, 4), doc_ids=torch.ones(1, 8)))
    with pytest.raises(PackingError, match="neither of input_ids and inputs_embeds"):
        read_documents({"doc_ids": torch.ones(1, 8)})
    with pytest.raises(PackingError, match=r"input_ids has shape \(8,\)"):
        read_documents({"input_ids": torch.zeros(8), "doc_ids": torch.ones(8)})
    with pytest.raises(
        PackingError, match=r"doc_ids has shape \(1, 6\), but the batch holds 1 x 8"
    ):
        read_documents(batch(doc_ids=torch.ones(1, 6)))
    two = {"input_ids": torch.zeros(2, 4), "cu_seqlens": torch.tensor([0, 3, 8])}
    with pytest.raises(PackingError, match="across the end of batch row 0"):
        read_documents(two)


def test_first_difference_names_document_and_rows():
    rows = [PackedRow.from_lengths([4, 4]), PackedRow.from_lengths([5, 3])]
    assert first_difference(rows) == "document 0 covers rows (0, 4) on 0 and (0, 5) on 1"
    assert first_difference(rows[:1] * 3) is None
    shorter = [PackedRow.from_lengths([4]), PackedRow.from_lengths([4, 4])]
    assert first_difference(shorter) == "0 has 1 documents in 4 rows and 1 has 2 in 8"


def test_padding_to_a_length():
    row = PackedRow.from_lengths([7])
    assert row.pad_to(8).length == 8
    assert row.pad_to(8).documents == row.documents
    with pytest.raises(PackingError, match="7 tokens cannot be padded to 6"):
        row.pad_to(6)
    assert str(row.pad_to(9)) == "1 documents of [7] tokens and 2 padding rows"
