"""Every layout on the same rows: balance, bytes, and predicted times, with a recommendation."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longpack.errors import PlanError, RunError
from longpack.packing import PackedRow
from longpack.plan import CostModel, LayerShape, Machine, Plan, StepCost, plan_step
from longpack.plan.layouts import shortfall

DEFAULT_LAYOUTS = (
    "contiguous",
    "head_tail",
    "zigzag",
    "balanced:1.01",
    "balanced:1.05",
    "balanced:1.1",
    "balanced:1.2",
)
ALLGATHER = "zigzag, allgather"
HEADS = "head exchange"


@dataclass(frozen=True)
class Line:
    """One way to split the rows; means over rows unless said otherwise.

    Args:
        name: the layout, moved by all-to-all; or a comparison: `zigzag, allgather` and `head
            exchange` (Ulysses).
        imbalance, imbalance_worst: area of the busiest rank over the mean, and of the worst row.
        tokens_least, tokens_most: real tokens of the emptiest and fullest rank.
        received_bytes, received_bytes_worst: of K and V in one forward pass of one layer, by a
            rank on average and by the busiest. A head exchange moves queries and outputs too.
        segments: query segments per rank.
        attention_ms, exchange_ms, linear_ms, step_ms: predicted, of the slowest rank.
        missed: why a row is over the tolerance asked for, if one is.
    """

    name: str
    imbalance: float
    imbalance_worst: float
    tokens_least: int
    tokens_most: int
    received_bytes: float
    received_bytes_worst: float
    segments: float
    attention_ms: float
    exchange_ms: float
    linear_ms: float
    step_ms: float
    missed: str | None = None


@dataclass(frozen=True)
class PlanReport:
    """What layouts do to rows.

    Args:
        rows, row_tokens, documents: how many rows, how long, with how many documents on average.
        world_size: cp ranks.
        lines: one per way to split.
        left_out: ways that do not apply, with the reason.
        model: what times were predicted with.
    """

    rows: int
    row_tokens: int
    documents: float
    world_size: int
    lines: tuple[Line, ...]
    left_out: dict[str, str]
    model: CostModel

    @property
    def local_length(self) -> int:
        """Rows of a rank, padding included, in tokens."""
        return -(-self.row_tokens // self.world_size)

    @property
    def best(self) -> Line:
        """The layout of longpack with the shortest predicted step."""
        ours = [line for line in self.lines if line.name not in (ALLGATHER, HEADS)]
        return min(ours, key=lambda line: line.step_ms)

    @property
    def recommendation(self) -> str:
        """One sentence."""
        best = self.best
        base = next((x for x in self.lines if x.name == "contiguous"), best)
        sentence = (
            f"Use layout={best.name!r}: predicted {best.step_ms:.4g} ms a step, "
            f"{base.step_ms / best.step_ms:.2f} times as fast as contiguous, with the busiest "
            f"rank {best.imbalance:.2f} times the mean attention and "
            f"{best.received_bytes / 1e6:.3g} MB received by a rank in a layer."
        )
        heads = next((x for x in self.lines if x.name == HEADS), None)
        if heads and heads.step_ms < best.step_ms:
            sentence += f" A head exchange is predicted faster still, {heads.step_ms:.4g} ms."
        return sentence

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            **{k: getattr(self, k) for k in ("rows", "row_tokens", "documents", "world_size")},
            "lines": [asdict(line) for line in self.lines],
            "left_out": self.left_out,
            "model": asdict(self.model),
            "best": self.best.name,
            "recommendation": self.recommendation,
        }


def cost_model(
    shape: LayerShape,
    rates: Path | None,
    near_gbytes_per_s: float,
    far_gbytes_per_s: float,
    ranks_per_node: int,
) -> CostModel:
    """Return a cost model from a model's shape, calibrated rates and link speeds.

    Args:
        shape: of the model.
        rates: JSON that `longpack bench calibrate --json` printed; the default machine's if None.
        near_gbytes_per_s, far_gbytes_per_s: links of one rank, in 1e9 bytes a second.
        ranks_per_node: cp ranks that share a node.

    Raises:
        RunError: the file is not there, or holds no rates.
    """
    try:
        known = json.loads(rates.read_text("utf-8"))["rates"] if rates else {}
        machine = Machine(**known)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{rates} holds no rates ({type(error).__name__}: {error}): pass what `longpack bench "
            "calibrate --json` prints"
        ) from error
    links = {
        "near_bytes_per_s": 1e9 * near_gbytes_per_s,
        "far_bytes_per_s": 1e9 * far_gbytes_per_s,
        "ranks_per_node": ranks_per_node,
    }
    return CostModel(shape, replace(machine, **links))


def report(
    rows: Sequence[PackedRow],
    world_size: int,
    model: CostModel | None = None,
    layouts: Sequence[str] = DEFAULT_LAYOUTS,
) -> PlanReport:
    """Lay out every row in every way and predict its step.

    Args:
        rows: packed rows, at least one.
        world_size: cp ranks.
        model: heads, head size, rates; `CostModel()` by default.
        layouts: names that `plan_step` takes.
    """
    if not rows:
        raise PlanError("there is no row to report on: pass at least one packed row")
    model = model or CostModel()
    lines = [_line(name, name, "a2a", rows, world_size, model) for name in layouts]
    lines.append(_line(ALLGATHER, "zigzag", "allgather", rows, world_size, model))
    left_out = {}
    heads = _heads_line(rows, world_size, model)
    if heads is None:
        shape = model.shape
        left_out[HEADS] = (
            f"{shape.num_heads} query and {shape.num_kv_heads} K/V heads do not both divide over "
            f"{world_size} ranks"
        )
    else:
        lines.append(heads)
    return PlanReport(
        rows=len(rows),
        row_tokens=rows[0].length,
        documents=statistics.mean(map(len, rows)),
        world_size=world_size,
        lines=tuple(lines),
        left_out=left_out,
        model=model,
    )


def _line(
    name: str,
    layout: str,
    kv_exchange: str,
    rows: Sequence[PackedRow],
    world_size: int,
    model: CostModel,
) -> Line:
    figures, missed = [], None
    for row in rows:  # one plan at a time: a plan of 16 million tokens is large
        plan = plan_step(row, world_size, layout, kv_exchange)
        cost = model.predict(plan.shards, plan.pieces, plan.kv_exchange)
        figures.append(_figures(plan, model) + _times(cost))
        missed = missed or shortfall(layout, row, plan.shards)
    return replace(_mean(name, figures), missed=missed)


def _heads_line(rows: Sequence[PackedRow], world_size: int, model: CostModel) -> Line | None:
    figures = []
    for row in rows:
        cost = model.predict_head_exchange(row, world_size)
        if cost is None:
            return None
        n = -(-row.length // world_size)
        received = model.head_exchange_bytes(n, world_size)
        last = max(0, row.tokens - (world_size - 1) * n)
        figures.append((1.0, last, n, received, received, float(len(row)), *_times(cost)))
    return _mean(HEADS, figures)


def _figures(plan: Plan, model: CostModel) -> tuple[float, ...]:
    """Imbalance, least and most tokens, mean and worst bytes, segments of one plan."""
    received = np.array(plan.received_tokens) * model.shape.kv_bytes
    tokens, segments = plan.tokens, statistics.mean(plan.segment_count)
    return plan.imbalance, min(tokens), max(tokens), received.mean(), received.max(), segments


def _times(cost: StepCost) -> tuple[float, ...]:
    """Attention, exchange, linear and step in milliseconds."""
    slowest = (cost.attention_s.max(), cost.exchange_s.max(), cost.linear_s, cost.step_s)
    return tuple(1e3 * float(seconds) for seconds in slowest)


def _mean(name: str, figures: list[tuple[float, ...]]) -> Line:
    imbalance, least, most, received, worst, segments, attention, exchange, linear, step = np.array(
        figures
    ).T
    return Line(
        name=name,
        imbalance=float(imbalance.mean()),
        imbalance_worst=float(imbalance.max()),
        tokens_least=int(least.min()),
        tokens_most=int(most.max()),
        received_bytes=float(received.mean()),
        received_bytes_worst=float(worst.mean()),
        segments=float(segments.mean()),
        attention_ms=float(attention.mean()),
        exchange_ms=float(exchange.mean()),
        linear_ms=float(linear.mean()),
        step_ms=float(step.mean()),
    )
