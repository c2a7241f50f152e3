"""Documents, padding and positions: each kind of fault in its smallest row."""

import dataclasses

import pytest
import torch
from tests.verify.patients import Attention, Patient
from tests.verify.test_faults import found, patient

from longpack import shard_batch
from longpack.loss import IGNORE
from longpack.verify import verify_model
from longpack.verify.subject import call_model


def batch_of(doc_ids, **instead):
    """A row of different tokens; `instead` of doc_ids may say where its documents are."""
    doc_ids = torch.tensor([doc_ids])
    ids = (torch.arange(doc_ids.shape[1])[None] % 60 + 1) * (doc_ids > 0)
    return {
        "input_ids": ids,
        "labels": ids.where(doc_ids > 0, IGNORE),
        **(instead or {"doc_ids": doc_ids}),
    }


def lengths_batch(*lengths):
    return batch_of([i for i, length in enumerate(lengths, 1) for _ in range(length)])


def other(doc_ids):
    """A loader's mistake: other documents for the same rows."""
    return lambda batch: {
        "input_ids": batch["input_ids"],
        "labels": batch["labels"],
        "doc_ids": torch.tensor([doc_ids]),
    }


def shorter(multiple):
    """A loader's mistake: the row ends at the last whole multiple."""

    def cut(batch):
        kept = batch["input_ids"].shape[1] // multiple * multiple
        return {key: value[:, :kept] for key, value in batch.items()}

    return cut


def longer(doc_ids):
    """A loader's own padding: rows of token 0 without a target."""

    def pad(batch):
        more = len(doc_ids) - batch["input_ids"].shape[1]
        padded = {
            key: torch.nn.functional.pad(batch[key], (0, more), value=fill)
            for key, fill in (("input_ids", 0), ("labels", IGNORE))
        }
        return {**padded, "doc_ids": torch.tensor([doc_ids])}

    return pad


BLOCKS = torch.block_diag(*[torch.ones(4, 4).tril()] * 2).bool()[None, None]
LOADERS = {
    "boundary lost": (lengths_batch(5, 3), 2, other([1] * 8), "2 documents of .5, 3.*the plan 1 "),
    "position_ids alone": (
        batch_of([1] * 8, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])),
        2,
        other([1] * 8),
        "2 documents of .4, 4.*the plan 1 documents.*keys.*position_ids",
    ),
    "4-D mask alone": (
        batch_of([1] * 8, attention_mask=BLOCKS),
        2,
        other([1] * 8),
        "2 documents of .4, 4.*the plan 1 documents.*keys.*attention_mask",
    ),
    "padding inside": (
        batch_of([1, 1, 1, 0, 2, 2, 0, 0]),
        2,
        other([1, 1, 1, 2, 2, 0, 0, 0]),
        r"document 1 covers rows \(4, 6\) on 0 and \(3, 5\) on 1",
    ),
    "padding at the left": (
        batch_of([0, 0, 1, 1, 1, 2, 2, 2]),
        2,
        other([1, 1, 1, 2, 2, 2, 0, 0]),
        r"document 0 covers rows \(2, 5\) on 0 and \(0, 3\) on 1",
    ),
    "an id comes back": (
        batch_of([1, 1, 2, 2, 1, 1, 3, 3]),
        2,
        other([1, 1, 1, 1, 2, 2, 3, 3]),
        r"4 documents.*the plan 3.*document 0 covers rows \(0, 2\) on 0 and \(0, 4\)",
    ),
    "length rounded down": (lengths_batch(7), 2, shorter(2), "1 tokens were lost before the split"),
    "uneven shards cut off": (lengths_batch(20, 9), 4, shorter(4), "29 rows and the plan 28"),
    "padded by the remainder, as text": (
        lengths_batch(9),
        4,
        longer([1] * 10),
        r"document 0 covers rows \(0, 9\) on 0 and \(0, 10\) on 1",
    ),
    "each document padded": (
        lengths_batch(3, 5),
        2,
        longer([1] * 3 + [0] + [2] * 5 + [0] * 3),
        r"document 1 covers rows \(3, 8\) on 0 and \(4, 9\) on 1",
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_that_loses_documents_or_rows(kind):
    batch, world_size, loader, said = LOADERS[kind]
    shard = lambda whole, transport: shard_batch(loader(whole), transport)  # noqa: E731
    report = verify_model(Patient(), batch, world_size=world_size, shard=shard)
    assert "documents" in found(report, "documents", text=f"(?s){said}")


@pytest.mark.parametrize(
    ("batch", "world_size", "shard"),
    [
        (lengths_batch(2), 3, None),
        (lengths_batch(1), 8, None),
        (batch_of([1] * 12 + [0] * 8), 3, None),
        (batch_of([1, 1, 0, 2, 2, 2, 2, 0, 1, 1]), 3, None),
        (lengths_batch(7), 2, longer([1] * 7 + [0] * 3)),
    ],
    ids=["2 tokens on 3", "1 token on 8", "ranks of padding", "padding inside", "own padding"],
)
def test_a_row_that_is_right(batch, world_size, shard):
    own = None if shard is None else (lambda b, t: shard_batch(shard(b), t))
    report = verify_model(Patient(), batch, world_size=world_size, shard=own)
    assert report.good, [str(finding) for finding in report.findings]


class GlobalBounds(Attention):
    """Numbers local rows from 0 and looks them up among the boundaries of the whole row."""

    def attend(self, query, key, value, step):
        row = torch.arange(query.shape[2])
        document = torch.searchsorted(step.packed_cu_seqlens, row, right=True)
        seen = (document[:, None] == document) & (row[:, None] >= row)
        scores = (query @ key.mT * query.shape[3] ** -0.5).masked_fill(~seen, float("-inf"))
        return scores.softmax(-1) @ value


def test_global_boundaries_on_local_rows():
    report = verify_model(patient(attention=GlobalBounds()), lengths_batch(6, 2), only=["parity"])
    found(report, "parity", r"^blocks\.1\.attention$", "one rank is right")


class LeavesGradients(torch.autograd.Function):
    """Backward writes the rows that documents cover into memory that nobody has cleared."""

    @staticmethod
    def forward(ctx, x, covered):
        ctx.save_for_backward(covered)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        (covered,) = ctx.saved_tensors
        return torch.where(covered[:, None], grad, torch.full_like(grad, 0.1)), None


class Uncovered(Attention):
    def attend(self, query, key, value, step):
        rows = torch.from_numpy(step.plan.shards.rows(step.rank))
        query = LeavesGradients.apply(query, rows < step.plan.row.documents[-1][1])
        return super().attend(query, key, value, step)


def test_gradients_of_rows_past_the_last_boundary():
    batch = batch_of([1] * 4 + [2] * 2 + [0] * 2)
    report = verify_model(patient(attention=Uncovered()), batch)
    found(report, "parity", r"^blocks\.", "already the packed row on one rank is off")


class CountsItself(Patient):
    """Takes no position_ids and counts its local rows."""

    def forward(self, input_ids, cp_step=None):
        positions = torch.arange(input_ids.shape[1])[None]
        return self.head(self.run_blocks(self.embed(input_ids, positions), cp_step))


def test_positions_counted_by_the_model():
    report = verify_model(CountsItself(), lengths_batch(5, 3))
    assert found(
        report, "parity", "^CountsItself$", "hands something else to positions for a packed row"
    ) == ["parity"]


def test_positions_in_local_order():
    """Rank 0 of zigzag holds rows 0, 3, 4, 7, and is given the first four positions."""

    def forward(model, share):
        positions = torch.tensor([[0, 1, 2, 3]])
        return call_model(
            model,
            dataclasses.replace(share, inputs={**share.inputs, "position_ids": positions}),
        )

    report = verify_model(Patient(), lengths_batch(4, 4), layout="zigzag", forward=forward)
    found(report, "positions", "position_ids of rank 0", "local row 1, is 1 and should be 3")


class Multimodal(Patient):
    """Adds an embedding of each row of `position_ids` `[R, 1, L]`, the first of which is text."""

    def embed(self, input_ids, position_ids):
        return self.tokens(input_ids) + self.positions(position_ids).mean(0)


def with_3d_positions(batch, number):
    text = torch.arange(4).repeat(2)
    rows = [text] + [torch.arange(8) * 2 + r for r in range(1, number)]
    return {**batch, "position_ids": torch.stack(rows)[:, None]}


def test_positions_of_several_kinds():
    batch = with_3d_positions(lengths_batch(4, 4), 3)
    report = verify_model(Multimodal(), batch, layout="zigzag", text_row=0)
    assert report.good, [str(finding) for finding in report.findings]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x, rank: x.chunk(2, 0)[rank], r"\(2, 1, 8\) and should be \(4, 1, 4\).*last dim"),
        (lambda x, rank: x, r"\(4, 1, 8\) and should be \(4, 1, 4\).*it was not split"),
        (lambda x, rank: x[..., :4], "local row 1, is 1 and should be 3"),
    ],
    ids=["first dim", "not split", "without the layout"],
)
def test_positions_of_several_kinds_that_are_split_wrongly(wrong, said):
    batch = with_3d_positions(lengths_batch(4, 4), 4)

    def forward(model, share):
        positions = wrong(batch["position_ids"], share.step.rank)
        return model(**{**share.inputs, "position_ids": positions})

    report = verify_model(Multimodal(), batch, layout="zigzag", forward=forward)
    assert found(report, "positions", "^position_ids of rank 0$", said)[0] == "positions"


def test_positions_that_were_never_split():
    batch = lengths_batch(4, 4)

    def forward(model, share):
        return model(**{**share.inputs, "position_ids": torch.arange(8)[None]})

    report = verify_model(Patient(), batch, forward=forward)
    found(report, "positions", "position_ids of rank 0", r"\(1, 8\) and should be \(1, 4\)")
