"""Fuzz what says where documents are: batches of every convention, and PackedRow's own doors."""

import random

from tests.fuzz.batches import make, valid_batch
from tests.fuzz.judge import check, judge, sound
from tests.fuzz.oddities import NUMBERS, anything, mutate
from tests.fuzz.reading import (
    SLOTS,
    UnreadableError,
    by_ids,
    by_offsets,
    flat,
    lists,
    shape_of,
    whole,
)
from tests.fuzz.reading import read as brute_force

from longpack import PackedRow
from longpack.packing import read_documents


def documents_case(rng: random.Random) -> str:
    made = make(rng)
    with sound(made.valid):
        row = read_documents(made.batch, text_row=made.text_row)
    try:
        expected = brute_force(made.batch, made.b, made.s, made.text_row)
    except UnreadableError as why:
        check(False, "accepted as", row, "but", why, made)
    check(list(row.documents) == expected, row.documents, "is not", expected, made)
    check(row.length == made.b * made.s, "covers", row.length, made)
    return "right"


def test_documents_of_batches():
    judge("documents", documents_case)


def _lengths(rng: random.Random) -> str:
    lengths = [rng.randint(0, 9) for _ in range(rng.randint(0, 4))]
    padding = rng.randint(0, 3)
    if rng.random() < 0.5 and lengths:
        lengths[0] = anything(rng)
    if rng.random() < 0.3:
        padding = rng.choice(NUMBERS)
    row = PackedRow.from_lengths(lengths, padding)
    sizes, (gap,) = whole(lists(lengths)), whole(flat(lists(padding)))
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    expected = [(stop - n, stop) for stop, n in zip(stops, sizes, strict=True) if n]
    check(list(row.documents) == expected and row.length == sum(sizes) + gap, row, lengths)
    return "right"


def _spans(rng: random.Random) -> str:
    documents = rng.choice([((0, 3), (3, 5)), ((1, 2),), (), ((0, 4), (2, 6)), ((0, 0),)])
    length = rng.randint(0, 8)
    if rng.random() < 0.4:
        documents = rng.choice([anything(rng), (anything(rng),), ((0, anything(rng)),)])
    if rng.random() < 0.4:
        length = anything(rng)
    row = PackedRow(documents, length)
    ends = [0, *(n for span in row.documents for n in span), row.length]
    check(all(type(n) is int for n in ends) and ends == sorted(ends), "accepted", row)
    check(len(row.doc_ids()) == row.length == length, row.length, "is not", length)
    check(row.tokens == sum(stop - start for start, stop in documents), row)
    return "right"


def _ids(rng: random.Random) -> str:
    ids = valid_batch(rng, 2, 9).batch.get("doc_ids")
    value = anything(rng) if ids is None else mutate(rng, ids)
    padding_id = rng.choice([0, 0, -1, 1, anything(rng)])
    row = PackedRow.from_doc_ids(value, padding_id=padding_id)
    (padding_id,) = whole(flat(lists(padding_id)))
    found = by_ids(whole(flat(lists(value))), padding_id, shape_of(value)[-1])
    check(row.doc_ids().tolist() == [n or 0 for n in found], row, "of", value)
    return "right"


def _offsets(rng: random.Random) -> str:
    batch = valid_batch(rng, 1, 12).batch
    ends = batch.get("cu_seqlens", batch.get("cu_seq_lens_q"))
    slots = batch.get("cu_seqlens_padded") if rng.random() < 0.7 else None
    if ends is None or rng.random() < 0.5:
        ends = anything(rng) if ends is None else mutate(rng, ends)
    elif slots is not None:
        slots = mutate(rng, slots)
    length = rng.choice([None, 12, 13, anything(rng)])
    row = PackedRow.from_cu_seqlens(ends, length, padded=slots)
    check(length is None or row.length == length, row.length, "is not", length)
    wide = max(row.length, 1)
    found = by_offsets({"cu_seqlens": ends, SLOTS[0]: slots}, "cu_seqlens", 1, wide)
    bounds = [n for n in found if n is not None]
    check(row.tokens == len(bounds) and len(row) == len(set(bounds)), row, "of", ends)
    return "right"


def row_case(rng: random.Random) -> str:
    try:
        return rng.choice([_lengths, _spans, _ids, _offsets])(rng)
    except UnreadableError as why:
        check(False, "accepted, but", why)
        raise


def test_rows():
    judge("rows", row_case)
