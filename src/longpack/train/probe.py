"""The boundary probe: change one document, and see that no other moves."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from longpack.blockdiag_cp import ShardedBatch
from longpack.train.rows import Row


@dataclass(frozen=True)
class BoundaryProbe:
    """How far logits moved when every token of one document was changed.

    Args:
        document: number of the changed document in its row, from 0.
        start, stop: rows of the changed document.
        documents: in the row.
        moved_inside: largest change of a logit of the changed document; must not be 0.
        moved_outside: largest change of a logit of any other document; must be exactly 0.
    """

    document: int
    start: int
    stop: int
    documents: int
    moved_inside: float
    moved_outside: float

    @property
    def held(self) -> bool:
        """Say whether documents are apart, and the probe could have seen it if not."""
        return self.moved_outside == 0.0 and self.moved_inside > 0.0


def probe_boundaries(
    model: torch.nn.Module, row: Row, shard: Callable[[Row], ShardedBatch], vocab_size: int
) -> BoundaryProbe:
    """Change the document in the middle of a row and compare logits before and after.

    At cp > 1 with the contiguous layout that document is one that ranks share. Every rank of the
    cp axis calls it, and gets the same values.

    Args:
        model: as in training.
        row: with at least two documents.
        shard: makes this rank's batch of a row.
        vocab_size: of the tokenizer.
    """
    bounds = row.documents.bounds
    document = int(np.searchsorted(bounds[:, 1], len(row.tokens) // 2, side="right"))
    start, stop = (int(b) for b in bounds[document])
    tokens = row.tokens.copy()
    tokens[start:stop] = (tokens[start:stop] + 1) % vocab_size
    with torch.no_grad():
        (before, sharded), (after, _) = (
            _logits(model, shard(r)) for r in (row, Row(tokens, row.documents))
        )
        moved = sharded.unshard((after - before).abs().amax(dim=-1).float())[0]
    inside = torch.zeros(len(moved), dtype=torch.bool, device=moved.device)
    inside[start:stop] = True
    return BoundaryProbe(
        document=document,
        start=start,
        stop=stop,
        documents=len(bounds),
        moved_inside=moved[inside].max().item(),
        moved_outside=moved[~inside].max().item(),
    )


def _logits(model: torch.nn.Module, sharded: ShardedBatch) -> tuple[torch.Tensor, ShardedBatch]:
    return model(**sharded.inputs).logits, sharded
