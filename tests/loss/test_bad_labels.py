"""Labels and counts that would have gone wrong quietly, or failed in words of torch's own."""

import numpy as np
import pytest
import torch

from longpack import PackedRow, shard_batch
from longpack.errors import PackingError
from longpack.loss import count_targets, cross_entropy, next_token_targets


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_labels_whose_dtype_cannot_hold_the_mark(dtype):
    labels = torch.ones(4).to(dtype)
    with pytest.raises(PackingError, match=f"labels are {dtype}; pass signed integers, -100"):
        next_token_targets(labels, PackedRow.from_lengths([4]))
    ids = torch.ones(1, 4).long()
    with pytest.raises(PackingError, match="pass signed integers"):
        shard_batch({"input_ids": ids, "doc_ids": ids, "labels": labels[None]})


@pytest.mark.parametrize("targets", [[1, 2], np.ones(2), torch.ones(2).long().to("meta")])
def test_targets_that_cannot_be_counted(targets):
    with pytest.raises(PackingError, match="pass a strided tensor with data"):
        count_targets(targets)


@pytest.mark.parametrize(
    ("logits", "targets", "count", "said"),
    [
        (torch.ones(3, 5), torch.ones(4).long(), 1, r"logits are \(3, 5\) on cpu, targets \(4,\)"),
        (torch.ones(4, 5).long(), torch.ones(4).long(), 1, "floating-point logits"),
        (torch.ones(4, 5), torch.full((4,), 5), 1, "Target 5 is out of bounds. Logits have 5"),
        (torch.ones(4, 5), torch.full((4,), -1), 1, "Target -1 is out of bounds"),
        (torch.ones(4, 5), torch.ones(4).long(), 0, "num_targets=0 must be an int64 of at least 1"),
    ],
)
def test_losses_that_do_not_exist(logits, targets, count, said):
    with pytest.raises(PackingError, match=said):
        cross_entropy(logits, targets, count)


def test_int32_targets_are_targets():
    logits, targets = torch.randn(4, 5), torch.tensor([1, -100, 2, 0])
    assert torch.equal(cross_entropy(logits, targets.int(), 3), cross_entropy(logits, targets, 3))
