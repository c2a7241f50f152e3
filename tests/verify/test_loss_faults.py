"""Losses that are wrong, each named by the mistake that it is, and one that is more than wrong."""

import pytest
import torch
import torch.nn.functional as F
from tests.verify.patients import Patient
from tests.verify.test_faults import found, tiny

from longpack import PackedRow, shard_batch
from longpack.loss import IGNORE, cross_entropy
from longpack.verify import load_model, verify_model
from longpack.verify.batches import random_batch


def own_mean(logits, labels, shift_labels, count):
    return F.cross_entropy(logits[0], shift_labels[0], ignore_index=IGNORE)


def shifted_after_the_split(logits, labels, shift_labels, count):
    return cross_entropy(logits[:, :-1], labels[:, 1:], count)


def summed(logits, labels, shift_labels, count):
    return cross_entropy(logits, shift_labels, 1)


def wrong_gradient(logits, labels, shift_labels, count):
    right = cross_entropy(logits, shift_labels, count)
    return right.detach() + 2 * (right - right.detach())


def label_smoothing(logits, labels, shift_labels, count):
    total = F.cross_entropy(
        logits[0], shift_labels[0], ignore_index=IGNORE, label_smoothing=0.1, reduction="sum"
    )
    return total / count


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (own_mean, r"divides by its own number of targets\."),
        (shifted_after_the_split, "shifted twice"),
        (summed, "the sum is not divided"),
        (wrong_gradient, "gradient in the logits is 1"),
        (label_smoothing, "no cross-entropy of the logits that the doctor knows"),
    ],
)
def test_a_wrong_loss(loss, text):
    class Wrong(Patient):
        def loss(self, logits, shift_labels, num_items_in_batch, labels):
            return loss(logits, labels, shift_labels, num_items_in_batch)

    report = verify_model(Wrong())
    assert found(report, "loss", text=text) == ["loss"]


def test_labels_shifted_after_the_split():
    """What a stock model does with labels that were split and not shifted."""

    def forward(model, share):
        labels = share.inputs["input_ids"]
        inputs = {**share.inputs, "labels": labels}
        del inputs["shift_labels"]
        return model(**inputs)

    batch = dict(random_batch(128))
    batch["labels"] = batch["input_ids"]
    report = verify_model(load_model(tiny("llama")).model, batch, forward=forward)
    found(report, "loss", text="labels are shifted after the split")


def test_targets_that_cross_documents():
    def shard(batch, transport):
        after = batch["labels"].roll(-1, 1)
        after[:, -1] = IGNORE
        whole = {k: v for k, v in batch.items() if k != "labels"}
        return shard_batch({**whole, "shift_labels": after}, transport, check_agreement=False)

    report = verify_model(Patient(), shard=shard)
    found(report, "loss", text="targets cross from one document into the next")


def test_targets_counted_over_too_many_ranks():
    def shard(batch, transport):
        share = shard_batch(batch, transport, check_agreement=False)
        share.inputs["num_items_in_batch"] *= transport.world_size
        return share

    report = verify_model(Patient(), shard=shard)
    found(report, "loss", text="averaged over ranks that already divided")


def test_a_rank_without_a_target():
    class Own(Patient):
        def loss(self, logits, shift_labels, num_items_in_batch, labels):
            return own_mean(logits, labels, shift_labels, 1) / 2  # right if ranks held equally many

    row = PackedRow.from_lengths([64, 64])
    batch = dict(random_batch(64))
    for key, value in batch.items():
        batch[key] = value[:, :1].expand(1, 128).clone()
    batch["input_ids"] = torch.arange(128)[None] % 60 + 1
    batch["labels"] = batch["input_ids"]
    batch["doc_ids"] = torch.from_numpy(row.doc_ids())[None]
    report = verify_model(Own(), batch)
    found(report, "loss", text="targets on rank 0 alone.*number of ranks")


@pytest.mark.parametrize(
    "config",
    [
        tiny("mixtral", head_dim=16, num_local_experts=4),
        tiny("qwen3_moe", head_dim=16, num_experts=4, moe_intermediate_size=32),
    ],
    ids=["mixtral", "qwen3_moe"],
)
def test_an_auxiliary_term_is_said_and_no_fault(config):
    """Each rank balances its own rows, so that two ranks add the term about twice."""
    report = verify_model({**config, "num_experts_per_tok": 2, "output_router_logits": True})
    assert report.good, [str(finding) for finding in report.findings]
    result = report.result("loss")
    terms = result.data["auxiliary"]
    assert sum(terms["ranks"]) == pytest.approx(2 * terms["one_rank"], rel=0.1)
    assert "auxiliary term" in result.said
    assert f"{terms['one_rank']:.6f} on one" in result.said


@pytest.mark.parametrize(
    ("main", "text"),
    [
        (own_mean, "beside an auxiliary term"),
        (lambda logits, labels, shift_labels, count: logits.sum() * 0 + 1.0, "beside an auxil"),
    ],
    ids=["own mean", "constant"],
)
def test_a_wrong_loss_beside_an_auxiliary_term(main, text):
    class Both(Patient):
        def loss(self, logits, shift_labels, num_items_in_batch, labels):
            term = 1e-3 * self.head.weight.square().sum()
            return main(logits, labels, shift_labels, num_items_in_batch) + term

    assert found(verify_model(Both()), "loss", text=text) == ["loss"]


def test_a_term_that_changes_no_parameter_is_a_wrong_loss():
    class Off(Patient):
        def loss(self, logits, shift_labels, num_items_in_batch, labels):
            return cross_entropy(logits, shift_labels, num_items_in_batch) + 0.5

    found(verify_model(Off()), "loss", text="that the doctor knows")
