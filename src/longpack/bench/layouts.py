"""Layouts side by side on document lengths of real corpora: balance, traffic, plan time."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from longpack.bench.layout_baselines import min_heap, ptrr
from longpack.bench.lengths import draw_lengths, source
from longpack.bench.timing import machine, matmul
from longpack.packing import PackedRow
from longpack.plan import LAYOUTS, Pieces, Shards
from longpack.plan.layouts import Layout, balanced

MATMUL = 1024


@dataclass(frozen=True)
class Case:
    """Packed rows to lay out.

    Args:
        corpus: one of `longpack.bench.lengths.corpora()`.
        row_tokens: rows of a pack.
        longest_tokens: longer documents are cut off at this length.
        world_size: ranks.
    """

    corpus: str
    row_tokens: int
    longest_tokens: int
    world_size: int

    def row(self, seed: int) -> PackedRow:
        """Draw documents until the row is full; the last one ends with it."""
        count = 1024
        while True:
            lengths = np.minimum(draw_lengths(self.corpus, count, seed), self.longest_tokens)
            stops = np.cumsum(lengths)
            if stops[-1] >= self.row_tokens:
                break
            count *= 2
        kept = lengths[: int(np.searchsorted(stops, self.row_tokens)) + 1]
        kept[-1] -= kept.sum() - self.row_tokens
        return PackedRow.from_lengths(kept)


K = 1024
CASES = (
    Case("magi_default", 128 * K, 32 * K, 8),
    Case("magi_default", 512 * K, 512 * K, 32),
    Case("magi_default", 1024 * K, 1024 * K, 64),
    Case("magi_kernel_bench", 512 * K, 128 * K, 8),
    Case("distca_wlbllm", 128 * K, 128 * K, 8),
    Case("distca_prolong", 512 * K, 512 * K, 32),
    Case("sqlite3_doc", 128 * K, 128 * K, 8),
    Case("python_stdlib", 128 * K, 128 * K, 8),
)
PLAN_TIME = (
    Case("magi_default", 128 * K, 32 * K, 8),
    Case("magi_default", 1024 * K, 1024 * K, 64),
    Case("magi_default", 16 * 1024 * K, 4 * 1024 * K, 1024),
)
BASELINES: dict[str, Layout] = {"ptrr_128": ptrr, "min_heap_512": min_heap}


def run_layout_bench(
    cases: Sequence[Case] = CASES, packs: int = 20, layouts: dict[str, Layout] | None = None
) -> dict[str, Any]:
    """Lay out seeded packs of every case by every layout.

    Traffic is received rows over what an all-gather brings, `(P - 1) * local_length` a rank.
    Plan time is the median over packs, in milliseconds and as a multiple of one fp32 matmul of
    1024^3 timed between them: the ratio is what compares across machines.

    Args:
        cases: what to lay out.
        packs: rows of each case, drawn with seeds 0, 1, ...
        layouts: by name; all of longpack and the baselines by default, and then also the plan
            time of `balanced` up to 16M tokens on 1,024 ranks.
    """
    chosen = {**LAYOUTS, **BASELINES} if layouts is None else layouts
    yardstick = matmul(MATMUL)
    results = []
    for case in cases:
        rows = [case.row(seed) for seed in range(packs)]
        measured = {
            name: _measure(layout, rows, case, yardstick) for name, layout in chosen.items()
        }
        documents = statistics.mean(map(len, rows))
        results.append({**asdict(case), "documents_mean": documents, "layouts": measured})
    plan_time = []
    for case in PLAN_TIME if layouts is None else ():
        told = _measure(balanced, [case.row(seed) for seed in range(3)], case, yardstick)
        plan_time.append(asdict(case) | {k: v for k, v in told.items() if k.startswith("plan_")})
    return {
        "machine": machine(),
        "packs": packs,
        "matmul": f"{MATMUL}^3 fp32",
        "cases": results,
        "plan_time": plan_time,
        "sources": {case.corpus: source(case.corpus) for case in cases},
    }


def _measure(layout: Layout, rows: list[PackedRow], case: Case, yardstick: Any) -> dict[str, float]:
    plan_ms, ratios, figures = [], [], []
    layout(rows[0], case.world_size)  # warm
    for row in rows:
        yard_ms, _ = _time_ms(yardstick)
        took_ms, shards = _time_ms(lambda row=row: layout(row, case.world_size))
        plan_ms.append(took_ms)
        ratios.append(took_ms / yard_ms)
        figures.append(figures_of(row, shards))
    imbalance, mean, worst, segments = np.array(figures).T
    return {
        "imbalance_mean": float(imbalance.mean()),
        "imbalance_max": float(imbalance.max()),
        "traffic_mean": float(mean.mean()),
        "traffic_worst_rank": float(worst.mean()),
        "segments_mean": float(segments.mean()),
        "plan_ms": statistics.median(plan_ms),
        "plan_matmuls": statistics.median(ratios),
    }


def figures_of(row: PackedRow, shards: Shards) -> tuple[float, float, float, float]:
    """Return area max/mean, traffic on average and of the worst rank, segments per rank."""
    pieces = Pieces.cut(row, shards)
    world_size = shards.world_size
    imbalance = pieces.area.max() * world_size / row.area if row.area else 1.0
    received = (pieces.needed - pieces.tokens) / max(1, (world_size - 1) * shards.local_length)
    return imbalance, received.mean(), received.max(), pieces.count.mean()


def _time_ms(call: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return (time.perf_counter() - began) * 1e3, result
