"""Find the documents whose loss or gradient is not finite, once a step has gone wrong."""

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longpack.blockdiag_cp import ShardedBatch
from longpack.loss import IGNORE


def trace_nonfinite(
    model: torch.nn.Module, rows: Iterable[tuple[int, ShardedBatch]], num_targets: int, rank: int
) -> list[str]:
    """Run rows again and name this rank's documents with a loss or gradient that is not finite.

    Documents do not meet in attention, so one that breaks leaves the others' losses, and the
    gradients of their embeddings, finite. Every rank calls it, as the step did; parameters'
    gradients are spoilt.

    Args:
        model: with the parameters that the step ran with.
        rows: number in the step, from 0, and this rank's part of each.
        num_targets: of the step, over all ranks.
        rank: for the words.
    """
    return [
        f"row {number} document {document} on rank {rank} ({what})"
        for number, sharded in rows
        for what, bad in _nonfinite(model, sharded, num_targets).items()
        for document in _documents(sharded, bad)
    ]


def _nonfinite(
    model: torch.nn.Module, sharded: ShardedBatch, num_targets: int
) -> dict[str, Tensor]:
    """Return which local rows have a loss, and which a gradient, that is not finite."""
    embedded: list[Tensor] = []
    embeddings = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    hook = embeddings.register_forward_hook(lambda module, args, out: embedded.append(out))
    try:
        out = model(**{**sharded.inputs, "num_items_in_batch": num_targets})
    finally:
        hook.remove()
    embedded[0].retain_grad()
    targets = sharded.inputs["shift_labels"][0]
    losses = F.cross_entropy(
        out.logits[0].detach().double(), targets, ignore_index=IGNORE, reduction="none"
    )
    out.loss.backward()
    grad = embedded[0].grad
    found = {"loss": ~losses.isfinite()}
    if grad is not None:
        found["gradient"] = ~grad[0].isfinite().all(-1)
    return found


def _documents(sharded: ShardedBatch, bad: Tensor) -> list[int]:
    """Return the numbers of the documents, from 0, that hold some local rows."""
    plan = sharded.plan
    rows = plan.shards.rows(sharded.step.rank)[bad.cpu().numpy()]
    rows = rows[rows < plan.row.length]
    document = plan.row.doc_ids()[rows] - 1
    return np.unique(document[document >= 0]).tolist()
