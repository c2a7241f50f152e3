"""Draw a row with its documents coloured by rank, and the balance-versus-traffic front."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longpack.packing import PackedRow
from longpack.plan import Plan, plan_step
from longpack.plan_report.report import PlanReport

DRAWN = ("contiguous", "balanced:1.05", "zigzag")


def plot_report(
    report: PlanReport, row: PackedRow, path: Path | str, layouts: Sequence[str] = DRAWN
) -> Path:
    """Save the picture: above, one bar of the row per layout; below, every layout as a point.

    Args:
        report: its lines are the points.
        row: one packed row, drawn.
        path: where to save; the suffix says the format.
        layouts: those to draw the row for.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(layouts) + 1, 1, height_ratios=[1] * len(layouts) + [4])
    figure.set_size_inches(10, 2 + 0.8 * len(layouts) + 4)
    for bar, layout in zip(axes, layouts, strict=False):
        _draw_row(bar, plan_step(row, report.world_size, layout, "a2a"))
    axes[0].set_title(
        f"{len(row)} documents in {row.length:,} tokens on {report.world_size} ranks: "
        "colour is the rank, height the position in the document"
    )
    _draw_front(axes[-1], report)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return Path(path)


def _draw_row(axes: Any, plan: Plan) -> None:
    """Draw each piece as a slice of its document's triangle, in its rank's colour."""
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection

    p = plan.pieces
    low, high = p.start - p.doc_start, p.stop - p.doc_start
    shown = np.argsort(low - high, kind="stable")[:20_000]  # the largest: more cannot be seen
    corners = [
        [(p.start[i], 0), (p.start[i], low[i]), (p.stop[i], high[i]), (p.stop[i], 0)] for i in shown
    ]
    colours = colormaps["turbo"]((p.owner[shown] + 0.5) / plan.world_size)
    axes.add_collection(PolyCollection(corners, facecolors=colours))
    axes.set_xlim(0, plan.row.length)
    axes.set_ylim(0, max(1, high.max(initial=1)))
    axes.set_yticks([])
    axes.set_ylabel(plan.layout, rotation=0, ha="right")


def _draw_front(axes: Any, report: PlanReport) -> None:
    for line in report.lines:
        at, best = (line.received_bytes / 1e6, line.imbalance), line is report.best
        axes.plot(*at, "o", color="black" if best else "tab:blue")
        axes.annotate(
            f"{line.name} (recommended)" if best else line.name,
            at,
            textcoords="offset points",
            xytext=(2, 6),
            rotation=40,  # neighbours' names do not collide
        )
    axes.margins(x=0.15, y=0.25)
    axes.set_xlabel("MB received by a rank in one layer's forward pass, mean (less is better)")
    axes.set_ylabel("attention area, busiest rank / mean (1 is best)")
