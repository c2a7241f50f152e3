"""`longpack bench scaling`."""

from importlib import import_module
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from longpack.cli.bench_show import show


def scaling(
    *,
    split_tokens: int = 16384,
    rounds: int = 5,
    memory: bool = True,
    plot: Path | None = None,
    json: bool = False,
) -> int:
    """Measure time and memory of packed attention against tokens, and against ranks.

    Ranks are threads, timed by the processor time of each: wall time cannot fall below the work
    over this machine's cores.

    Parameters
    ----------
    split_tokens
        Rows of the row that is split over 1, 2 and 4 ranks.
    rounds
        Timed rounds; figures are medians.
    memory
        Also measure peak memory, in processes of their own.
    plot
        Save a picture (needs matplotlib).
    json
        Print everything as JSON.
    """
    if plot is not None:
        import_module("matplotlib")  # missing? said before minutes of work
    from longpack.bench.scaling import run_scaling_bench

    result = run_scaling_bench(split_tokens=split_tokens, rounds=rounds, memory=memory)
    if plot is not None:
        from longpack.bench.scaling_plot import plot_scaling

        plot_scaling(result, plot)
    return show(result, json, print_scaling)


def print_scaling(result: dict[str, Any], console: Console) -> None:
    """Print a table over tokens and one over ranks."""
    console.print(
        "forward and backward, fp32, 9/3 heads of 64, lengths of SQLite's documentation; MB are "
        "peaks beyond the inputs",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_over_tokens(result["over_tokens"]))
    console.print(_over_ranks(result["over_ranks"]))


def _over_tokens(entries: list[dict[str, Any]]) -> Table:
    table = Table(
        box=SIMPLE, padding=(0, 1), pad_edge=False, title="one rank, documents cut at 512 tokens"
    )
    columns = ("tokens", "keys a token", "longpack ms", "loop ms", "dense ms", "/ loop")
    for column in (*columns, "longpack MB", "loop MB", "dense MB"):
        table.add_column(column, justify="right", no_wrap=column == "/ loop")
    names = ("longpack_flash", "document_loop", "dense_mask")
    for entry in entries:
        wall, over = entry["median_ms"]["wall"], entry["over_loop"]
        table.add_row(
            f"{entry['tokens']:,}",
            f"{entry['area'] / entry['tokens']:,.0f}",
            *(_cell(wall.get(name)) for name in names),
            f"{over['wall']:.3f}, {over['processor']:.3f}",
            *(_megabytes(entry["peak_bytes"].get(name)) for name in names),
        )
    return table


def _over_ranks(entries: list[dict[str, Any]]) -> Table:
    table = Table(
        box=SIMPLE,
        padding=(0, 1),
        pad_edge=False,
        title=f"{entries[0]['tokens']:,} tokens in {entries[0]['documents']} documents over ranks, "
        "balanced a2a; of ranks the busiest",
    )
    columns = ("ranks", "wall ms", "processor ms", "speed-up", "work of all", "area max/mean")
    for column in (*columns, "received", "kept MB", "peak MB"):
        table.add_column(column, justify="right")
    for entry in entries:
        times = entry["median_ms"]
        table.add_row(
            str(entry["world_size"]),
            _cell(times["wall"]),
            _cell(times["busiest"]),
            f"{entry['speed_up']:.2f}",
            f"{entry['work']:.3f}",
            f"{entry['imbalance']:.2f}",
            f"{entry['received_tokens']:,}",
            _megabytes(entry["kept_bytes"]),
            _megabytes(entry["peak_bytes"]),
        )
    return table


def _cell(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:,.0f}"


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.0f}"
