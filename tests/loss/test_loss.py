"""Targets and loss: shifted inside documents before the split, counted over every rank."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from longpack import PackedRow, shard_batch
from longpack.collectives import Loopback
from longpack.errors import PackingError
from longpack.loss import IGNORE, count_targets, cross_entropy, next_token_targets
from longpack.plan import LAYOUTS
from longpack.testing import packed_rows


def test_targets_do_not_cross_documents_and_keep_ignored_labels():
    row = PackedRow.from_lengths([5, 3], padding=1)
    labels = torch.tensor([0, 1, -100, 3, 4, 5, 6, 7, 8])
    assert next_token_targets(labels, row).tolist() == [1, -100, 3, 4, -100, 6, 7, -100, -100]


def test_the_target_of_a_shards_last_row_is_the_next_shards_first_token():
    labels = torch.arange(16)
    batch = {"input_ids": labels[None], "labels": labels[None], "doc_ids": torch.ones(1, 16)}
    ranks = Loopback(2).run(lambda t: shard_batch(batch, t).inputs)
    assert ranks[0]["shift_labels"][0, -1] == 8
    assert ranks[1]["shift_labels"][0, -1] == IGNORE


@given(packed_rows(), st.randoms(use_true_random=False))
def test_targets_by_brute_force(row, random):
    labels = torch.tensor([random.choice([IGNORE, 1, 2, 3]) for _ in range(row.length)])
    ids = row.doc_ids()
    starts = {start for start, _ in row.documents}
    expected = [
        int(labels[i + 1])
        if i + 1 < row.length and ids[i] and ids[i] == ids[i + 1] and i + 1 not in starts
        else IGNORE
        for i in range(row.length)
    ]
    assert next_token_targets(labels.long(), row).tolist() == expected


def test_labels_of_another_length_are_refused():
    with pytest.raises(PackingError, match=r"shape \(3,\) but the row has 4 tokens"):
        next_token_targets(torch.arange(3), PackedRow.from_lengths([4]))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [[1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [0] * 8])
def test_loss_and_gradients_sum_to_one_rank(world_size, layout, mask):
    """Also where one rank holds every target, and where no rank holds any."""
    torch.manual_seed(0)
    logits = torch.randn(1, 8, 5, dtype=torch.float64)
    targets = torch.randint(5, (1, 8)).masked_fill(torch.tensor([mask]) == 0, IGNORE)
    batch = {
        "input_ids": torch.zeros(1, 8).long(),
        "doc_ids": torch.ones(1, 8),
        "shift_labels": targets,
        "logits": logits,
    }
    whole = logits.clone().requires_grad_()
    loss = F.cross_entropy(whole[0], targets[0], reduction="sum") / max(sum(mask), 1)
    loss.backward()

    def body(t):
        sharded = shard_batch(batch, t, layout)
        mine = sharded.inputs["logits"].clone().requires_grad_()
        part = cross_entropy(
            mine, sharded.inputs["shift_labels"], sharded.inputs["num_items_in_batch"]
        )
        part.backward()
        return part.item(), sharded.unshard(mine.grad)

    ranks = Loopback(world_size).run(body)
    assert sum(part for part, _ in ranks) == pytest.approx(loss.item(), abs=1e-15)
    torch.testing.assert_close(ranks[0][1], whole.grad, rtol=1e-12, atol=1e-15)


def test_low_precision_logits_are_summed_in_fp32():
    logits = torch.randn(4, 9).bfloat16()
    targets = torch.randint(9, (4,))
    assert cross_entropy(logits, targets, 4).dtype == torch.float32
    torch.testing.assert_close(
        cross_entropy(logits, targets, 4), F.cross_entropy(logits.float(), targets)
    )


def check_counts(rank, world_size):
    """dp 2 x cp 2: each token is counted once."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    replica = mesh["dp"].get_local_rank()
    length = [8, 6][replica]
    labels = torch.arange(length)[None]
    batch = {"input_ids": labels, "labels": labels, "doc_ids": torch.ones(1, length)}
    sharded = shard_batch(batch, mesh["cp"], dp_mesh=mesh["dp"])
    assert sharded.inputs["num_items_in_batch"] == 7 + 5
    assert shard_batch(batch, mesh["cp"]).inputs["num_items_in_batch"] == length - 1


def test_tokens_are_counted_once_over_dp_and_cp(on_ranks):
    on_ranks(check_counts, world_size=4)


def test_a_step_without_targets_divides_by_one():
    assert count_targets(torch.full((4,), IGNORE)) == 1
