"""What every step reports, and the file that keeps it."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from longpack.plan import plan_step
from longpack.train.config import ParallelSection
from longpack.train.rows import Row


@dataclass(frozen=True)
class Traffic:
    """How evenly a step's attention is spread and what it moves; counted, not timed.

    Args:
        area_max_over_mean: query-key pairs of the busiest rank over the mean; 1.0 is even.
        kv_bytes_max: bytes of K and V that arrive at the busiest rank in the step's forwards,
            all layers. The backward sends as much back; a checkpoint recompute brings it again.
        kv_bytes_mean: the mean over ranks.
        kv_bytes_gather: what each rank would receive were all K/V gathered.
    """

    area_max_over_mean: float
    kv_bytes_max: int
    kv_bytes_mean: float
    kv_bytes_gather: int

    @classmethod
    def of_step(
        cls,
        rows: Sequence[Row],
        parallel: ParallelSection,
        kv_shape: tuple[int, int, int],
        element_bytes: int,
        layers: int,
    ) -> Self:
        """Count the traffic of a step.

        Args:
            rows: all of the step; row i goes to replica i mod dp.
            parallel: the mesh, layout and exchange.
            kv_shape: `(num_kv_heads, head_dim, v_head_dim)`.
            element_bytes: of one number in K and V.
            layers: attention layers.
        """
        area, received, gathered = np.zeros((3, parallel.dp, parallel.cp))
        heads, head_dim, v_head_dim = kv_shape
        token_bytes = heads * (head_dim + v_head_dim) * element_bytes * layers
        for number, row in enumerate(rows):
            plan = plan_step(row.documents, parallel.cp, parallel.layout, parallel.kv_exchange)
            replica = number % parallel.dp
            area[replica] += plan.area
            received[replica] += plan.received_tokens
            gathered[replica] += plan.padded_length - plan.local_length
        return cls(
            area_max_over_mean=float(area.max() / area.mean()) if area.any() else 1.0,
            kv_bytes_max=int(received.max()) * token_bytes,
            kv_bytes_mean=float(received.mean()) * token_bytes,
            kv_bytes_gather=int(gathered.max()) * token_bytes,
        )


@dataclass(frozen=True)
class StepMetrics:
    """One line of `metrics.jsonl`.

    Args:
        step: counting from 1.
        loss: mean over the step's targets, all ranks.
        grad_norm: global, before clipping.
        lr: learning rate of the step.
        tokens: of all rows of the step.
        documents: documents, and pieces of documents, in these rows.
        tokens_per_s: over all ranks, rank 0's clock.
        attention_calls: made by this rank's forwards, all through longpack.
        epoch: passes over the corpus done before the step.
        traffic: its fields stand beside these in the file.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    documents: int
    tokens_per_s: float
    attention_calls: int
    epoch: int
    traffic: Traffic

    def record(self) -> dict[str, Any]:
        """Return the flat record that the file holds."""
        flat = asdict(self)
        traffic = flat.pop("traffic")
        return {**flat, **traffic}


class MetricsFile:
    """A JSON-lines file, one line a step, that a kill can at most cut in its last line.

    Args:
        path: created when missing.
        step: lines of later steps, and a torn last line, are taken out: those steps will run
            again.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(partial, path)
        self._file = path.open("a")

    def write(self, metrics: StepMetrics) -> None:
        """Append one step."""
        self._file.write(json.dumps(metrics.record()) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file, without a torn last line; none when it is missing."""
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
