"""Numbers that are not what they seem: floats too large to count with, other shapes, odd masks."""

import numpy as np
import pytest
import torch

from longpack import PackedRow, plan_step
from longpack.errors import PackingError, PlanError
from longpack.packing import read_documents


def batch(**keys):
    return {"input_ids": torch.zeros(2, 4).long(), **keys}


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1.0, float("inf")], "inf in float64, which tells integers apart below"),
        ([1.0, float("nan")], "nan in float64"),
        ([2.0**53], "in float64, which tells integers apart below 9007199254740992"),
        (torch.tensor([255, 257]).bfloat16(), "in bfloat16, which tells integers apart below 256"),
        (np.array([2**63], dtype=np.uint64), "9223372036854775808, which int64 cannot"),
        (["1", "2"], "holds <U1"),
        ([1 + 0j], "holds complex128"),
        ([2**70], "holds object"),
        ([[1], [1, 2]], "cannot be read as an array of numbers"),
        (np.ma.masked_equal([1, 2], 1), "holds masked entries"),
        (torch.ones(3, device="meta"), "cannot be read as an array of numbers"),
        (torch.ones(3).to_sparse(), "cannot be read as an array of numbers"),
    ],
)
def test_ids_that_are_no_exact_integers(ids, said):
    with pytest.raises(PackingError, match=said):
        PackedRow.from_doc_ids(ids)


def test_floats_that_are_exact_are_integers():
    assert PackedRow.from_doc_ids(torch.tensor([1, 1, 255]).bfloat16()).lengths == (2, 1)


def test_positions_do_not_wrap_around():
    assert len(PackedRow.from_position_ids([2**63 - 1, -(2**63)])) == 2
    with pytest.raises(PackingError, match="decreases"):
        PackedRow.from_cu_seqlens([0, 5, -(2**63) + 2], 8)


@pytest.mark.parametrize("lengths", [[2.5], [float("nan")], ["3"], [None], 4, [[1]]])
def test_lengths_that_are_no_integers(lengths):
    with pytest.raises(PackingError, match="lengths"):
        PackedRow.from_lengths(lengths)


@pytest.mark.parametrize(
    ("documents", "length"), [((), -1), ((), 2**31), ((), 2.0), ([(0, 1)], 1), (((0, "1"),), 1)]
)
def test_rows_of_other_types_and_sizes(documents, length):
    with pytest.raises(PackingError):
        PackedRow(documents, length)


def test_ids_of_another_shape_than_the_batch():
    with pytest.raises(PackingError, match=r"doc_ids has shape \(4, 2\)"):
        read_documents(batch(doc_ids=torch.ones(4, 2)))
    flat = read_documents(batch(doc_ids=[1] * 8))
    assert flat.documents == ((0, 4), (4, 8))  # batch rows end documents, however ids are laid
    with pytest.raises(PackingError, match=r"a batch of \[2, 4\] needs \[2, 1, 4, 4\]"):
        read_documents(batch(attention_mask=torch.ones(8, 1, 1, 1).bool()))


def test_slots_that_contradict_each_other():
    slots = {"cu_seqlens_q_padded": [0, 4, 8], "cu_seqlens_kv_padded": [0, 5, 8]}
    with pytest.raises(PackingError, match="contradict each other"):
        read_documents(batch(cu_seqlens=[0, 3, 6], **slots))


@pytest.mark.parametrize("mask", [[[0, -10000], [0, 0]], [[1.0, 0.0], [1.0, 1.0]]])
def test_square_masks_that_could_be_read_inverted(mask):
    with pytest.raises(PackingError, match="so its entries must be"):
        PackedRow.from_attention_mask(torch.tensor(mask)[None, None])


@pytest.mark.parametrize("world_size", [0, 2.0, True, "2", None, 2**40])
def test_world_sizes_that_are_none(world_size):
    with pytest.raises(PlanError, match="world_size="):
        plan_step(PackedRow.from_lengths([4]), world_size)


def test_a_tolerance_beyond_all_area_is_met():
    assert sum(plan_step(PackedRow.from_lengths([40, 3, 2]), 2, "balanced:1e308").tokens) == 45
