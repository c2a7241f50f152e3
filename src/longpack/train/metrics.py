"""What every step reports, and the file that keeps it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from longpack.errors import RunError
from longpack.plan import LayerShape, Plan
from longpack.train.durable import sync_file, write_file, writing

LOADS = 5  # numbers of a rank in `loads_of`


@dataclass(frozen=True)
class Traffic:
    """How evenly a step's attention is spread and what it moves; counted, not timed.

    Args:
        area_max_over_mean: query-key pairs of the busiest rank over the mean; 1.0 is even.
        step_waste: share of the step's arithmetic, attention and linear layers, in which the mean
            rank waits for the slowest; 0.0 is even.
        kv_bytes_max: bytes of K and V that arrive at the busiest rank in the step's forwards,
            all layers. The backward sends as much back; a checkpoint recompute brings it again.
        kv_bytes_mean: the mean over ranks.
        kv_bytes_gather: what each rank would receive were all K/V gathered.
    """

    area_max_over_mean: float
    step_waste: float
    kv_bytes_max: int
    kv_bytes_mean: float
    kv_bytes_gather: int

    @classmethod
    def of_loads(cls, loads: np.ndarray, shape: LayerShape) -> Self:
        """Make the figures of a step.

        Args:
            loads: float64 `[5, ranks]`, `loads_of` of every replica side by side.
            shape: of the model.
        """
        area, _, _, received, gathered = loads
        token_bytes = shape.kv_bytes * shape.num_layers
        return cls(
            area_max_over_mean=float(area.max() / area.mean()) if area.any() else 1.0,
            step_waste=step_waste(loads, shape),
            kv_bytes_max=int(received.max()) * token_bytes,
            kv_bytes_mean=float(received.mean()) * token_bytes,
            kv_bytes_gather=int(gathered.max()) * token_bytes,
        )


def loads_of(plans: Sequence[Plan]) -> np.ndarray:
    """Return what the rows of one replica ask of each of its ranks, float64 `[5, cp]`.

    Query-key pairs, those of each row's busiest rank, tokens held, K/V rows that arrive, and K/V
    rows that would were all gathered; each in one attention call of every row.
    """
    return np.stack([_loads_of_row(plan) for plan in plans]).sum(axis=0)


def _loads_of_row(plan: Plan) -> np.ndarray:
    loads = np.empty((LOADS, plan.world_size))
    loads[0], loads[1], loads[2] = plan.area, max(plan.area), plan.local_length
    loads[3], loads[4] = plan.received_tokens, plan.padded_length - plan.local_length
    return loads


def step_waste(loads: np.ndarray, shape: LayerShape) -> float:
    """Return `Traffic.step_waste`: 1 - the mean rank's FLOPs over those that the step waits for.

    The ranks of a replica meet in every row, so its busiest rank counts there; replicas meet once.
    """
    area, slowest, tokens = loads[:3]
    linear = tokens * shape.token_flops
    awaited = (slowest * shape.pair_flops + linear).max()
    return float(1 - (area * shape.pair_flops + linear).mean() / awaited) if awaited else 0.0


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
        attention_calls: that this rank's forwards and recomputes made through longpack; as many
            as expected, or the step stops the run.
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
    """A JSON-lines file, one line a step; a crash loses no line that a checkpoint covers.

    Args:
        path: created when missing.
        step: of the checkpoint that the run goes on from. Lines after it, whatever they hold, are
            taken out: those steps will run again.

    Raises:
        RunError: the file cannot be written, or a line up to `step` is damaged or missing.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = read_metrics(path, step)
        write_file(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._path, self._file = path, path.open("a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        """Append one step."""
        with writing(self._path):
            self._file.write(json.dumps(metrics.record()) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Bring the lines to the disk, before the checkpoint that covers them."""
        with writing(self._path):
            sync_file(self._file)

    def close(self) -> None:
        """Close the file."""
        with writing(self._path):
            self._file.close()


def read_metrics(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """Return the records of a metrics file, without a torn last line; none when it is missing.

    Args:
        path: the file.
        last: the step to stop after; what follows is not looked at.

    Raises:
        RunError: a line is no record of the step after the line before, or `last` is not there.
            Numbers are not checked.
    """
    if last == 0 or not path.is_file():
        return []
    remedy = "Restore it from a copy, or take it away to go on without the earlier lines"
    records: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        record = _record(line)
        if record is None or (records and record["step"] != records[-1]["step"] + 1):
            raise RunError(f"{path} is damaged, line {number} is no record of its step. {remedy}")
        records.append(record)
        if record["step"] == last:
            return records
    if last is not None and records:
        raise RunError(
            f"{path} is damaged, it ends at step {records[-1]['step']} and the checkpoint is of "
            f"step {last}. {remedy}"
        )
    return records


def _record(line: bytes) -> dict[str, Any] | None:
    """Return what a line holds, None if it is no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    numbers = [record.get(name) for name in _NEEDED] if isinstance(record, dict) else [None]
    return record if all(type(n) in (int, float) for n in numbers) else None


_NEEDED = ("step", "loss", "tokens_per_s")  # what is read from a file later on
