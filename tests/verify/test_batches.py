"""Batches that the doctor makes."""

import pytest
import torch

from longpack import PackedRow
from longpack.errors import UnsupportedError
from longpack.loss import IGNORE
from longpack.packing import read_documents
from longpack.testing import DANGEROUS_ROWS
from longpack.verify.batches import (
    change_document,
    document_batch,
    random_batch,
    reverse_documents,
    text_batch,
    whole_targets,
    without_labels,
)


def batch_of(row):
    ids = torch.arange(10, 10 + row.length)[None]
    doc_ids = torch.from_numpy(row.doc_ids())[None]
    positions = torch.from_numpy(row.position_ids())[None]
    labels = ids.where(doc_ids > 0, IGNORE)
    return {"input_ids": ids, "labels": labels, "doc_ids": doc_ids, "position_ids": positions}


def test_the_default_row_has_a_short_document_straddling_ones_and_padding():
    row = read_documents(random_batch(128))
    assert row.lengths == (37, 1, 24, 50, 16)
    assert row.length == 136
    assert torch.equal(random_batch(128)["input_ids"], random_batch(128)["input_ids"])


def test_real_documents_begin_where_their_files_do(tmp_path):
    batch = text_batch(lambda text: list(text.encode()))
    row = read_documents(batch)
    assert row.lengths == (37, 1, 24, 50, 16)
    assert bytes(batch["input_ids"][0, :10].tolist()) == b'"""Heap qu'
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("de")
    given = text_batch(lambda text: list(text.encode()), [tmp_path / "a.txt", tmp_path / "b.txt"])
    assert read_documents(given).lengths == (3, 1)


@pytest.mark.parametrize("name", DANGEROUS_ROWS)
def test_changing_a_document_changes_all_of_it_and_nothing_else(name):
    row = DANGEROUS_ROWS[name]
    batch = batch_of(row)
    for start, stop in row:
        differ = (change_document(batch, start, stop)["input_ids"] != batch["input_ids"])[0]
        assert differ[start:stop].all()
        assert differ.sum() == stop - start


@pytest.mark.parametrize("name", DANGEROUS_ROWS)
def test_reversed_documents_are_the_same_documents(name):
    row = DANGEROUS_ROWS[name]
    if not len(row):
        pytest.skip("no document")
    batch = batch_of(row)
    turned = reverse_documents(batch, row)
    assert read_documents(turned).lengths == row.lengths[::-1]
    tokens = [batch["input_ids"][0, a:b].tolist() for a, b in row]
    after = [turned["input_ids"][0, a:b].tolist() for a, b in read_documents(turned)]
    assert after == tokens[::-1]


def test_one_document_alone():
    row = PackedRow.from_lengths([3, 5])
    alone = document_batch(batch_of(row), 3, 8)
    assert alone["input_ids"].tolist() == [[13, 14, 15, 16, 17]]
    assert read_documents(alone).lengths == (5,)


@pytest.mark.parametrize("key", ["labels", "shift_labels"])
def test_targets_taken_away_from_some_rows(key):
    row = PackedRow.from_lengths([4, 6], padding=2)
    batch = batch_of(row)
    if key == "shift_labels":
        batch["shift_labels"] = whole_targets(batch, row)[None]
        del batch["labels"]
    before = whole_targets(batch, row)
    kept = torch.arange(row.length) < 6
    after = whole_targets(without_labels(batch, kept, row), row)
    assert torch.equal(after, before.where(kept, IGNORE))
    assert (after != IGNORE).sum() == 5


def test_a_batch_without_labels_is_refused():
    with pytest.raises(UnsupportedError, match="no labels"):
        whole_targets({"input_ids": torch.ones(1, 4)}, PackedRow.from_lengths([4]))
