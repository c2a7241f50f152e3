"""The picture of `longpack bench scaling`."""

from pathlib import Path
from typing import Any

COLOURS = {"longpack_flash": "#08306b", "document_loop": "#e6550d", "dense_mask": "#969696"}
STYLES = {"longpack_flash": "o-", "document_loop": "x--", "dense_mask": "s-"}


def plot_scaling(result: dict[str, Any], path: Path | str) -> Path:
    """Save four panels: time and peak memory, above against tokens, below against ranks.

    Args:
        result: of `run_scaling_bench`.
        path: where to save; the suffix says the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 2)
    _draw_tokens(above, result["over_tokens"])
    _draw_ranks(below, result["over_ranks"])
    for axes in (*above, *below):
        axes.grid(alpha=0.3, which="both")
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=90)
    return Path(path)


def _draw_tokens(panels: Any, entries: list[dict[str, Any]]) -> None:
    time, memory = panels
    for name, style in STYLES.items():
        drawn = {"color": COLOURS[name], "label": name.replace("_", " ")}
        timed = [e for e in entries if name in e["median_ms"]["wall"]]
        tokens = [e["tokens"] for e in timed]
        time.plot(tokens, [e["median_ms"]["wall"][name] for e in timed], style, **drawn)
        peaks = {e["tokens"]: e["peak_bytes"][name] / 1e6 for e in timed if name in e["peak_bytes"]}
        if peaks:
            memory.plot(list(peaks), list(peaks.values()), style, **drawn)
    time.set_title("one rank: forward and backward, ms")
    memory.set_title("one rank: peak memory beyond its inputs, MB")
    for axes in panels:
        _put_powers_of_two(axes, [e["tokens"] for e in entries])
        axes.set_xlabel("tokens in the row")


def _draw_ranks(panels: Any, entries: list[dict[str, Any]]) -> None:
    time, memory = panels
    ranks = [e["world_size"] for e in entries]
    busiest = [e["median_ms"]["busiest"] for e in entries]
    kept = [e["kept_bytes"] / 1e6 for e in entries]
    time.plot(ranks, busiest, "o-", color="#08306b", label="busiest rank")
    time.plot(ranks, _ideal(ranks, busiest), ":", color="gray", label="one rank's / ranks")
    memory.plot(ranks, kept, "o-", color="#08306b", label="kept for backward")
    memory.plot(ranks, _ideal(ranks, kept), ":", color="gray", label="one rank's / ranks")
    if all(e["peak_bytes"] for e in entries):
        peaks = [e["peak_bytes"] / 1e6 for e in entries]
        memory.plot(ranks, peaks, "x--", color="#e6550d", label="peak beyond its inputs")
    time.set_title(f"{entries[0]['tokens']:,} tokens split: processor time, ms")
    memory.set_title("most memory of a rank, MB")
    for axes in panels:
        _put_powers_of_two(axes, ranks)
        axes.set_xlabel("ranks")


def _ideal(ranks: list[int], values: list[float]) -> list[float]:
    return [values[0] * ranks[0] / n for n in ranks]


def _put_powers_of_two(axes: Any, ticks: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
