"""`longpack bench layouts`, `calibrate` and `straggler`."""

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from longpack.cli.bench_show import show


def layouts(*, packs: int = 20, json: bool = False) -> int:
    """Compare all layouts and two block-dealing baselines on real document lengths.

    Parameters
    ----------
    packs
        Seeded rows of each case.
    json
        Print everything as JSON.
    """
    from longpack.bench.layouts import run_layout_bench

    return show(run_layout_bench(packs=packs), json, print_layouts)


def print_layouts(result: dict[str, Any], console: Console) -> None:
    """Print a table for each case."""
    console.print(
        f"{result['packs']} packs of each. area: busiest rank over mean, on average and at most. "
        "traffic: received rows over an all-gather's, mean and busiest rank. plan: median "
        f"milliseconds, and over one {result['matmul']} matmul.",
        highlight=False,
        soft_wrap=True,
    )
    for case in result["cases"]:
        table = Table(
            box=SIMPLE,
            padding=(0, 1),
            pad_edge=False,
            title=f"{case['corpus']}: {case['row_tokens']:,} tokens, documents at most "
            f"{case['longest_tokens']:,}, {case['world_size']} ranks",
        )
        table.add_column("layout", no_wrap=True)
        for column in ("area", "most", "traffic", "busiest", "segments", "plan ms", "/ matmul"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, told in case["layouts"].items():
            table.add_row(
                name,
                f"{told['imbalance_mean']:.2f}",
                f"{told['imbalance_max']:.2f}",
                f"{told['traffic_mean']:.1%}",
                f"{told['traffic_worst_rank']:.1%}",
                f"{told['segments_mean']:,.0f}",
                f"{told['plan_ms']:,.1f}",
                f"{told['plan_matmuls']:.3f}",
            )
        console.print(table)
    for told in result["plan_time"]:
        console.print(
            f"balanced, {told['row_tokens']:,} tokens on {told['world_size']:,} ranks: "
            f"{told['plan_ms']:,.1f} ms, {told['plan_matmuls']:.2f} matmuls",
            highlight=False,
        )


def calibrate(*, tokens: int = 4096, rounds: int = 5, ranks: int = 2, json: bool = False) -> int:
    """Measure this machine's rates for `longpack plan --rates` and layout="auto".

    Parameters
    ----------
    tokens
        Rows of the timed attention.
    rounds
        Timed rounds; figures are medians.
    ranks
        Local gloo ranks of the timed exchange.
    json
        Print as JSON, which is what --rates reads.
    """
    from longpack.bench.calibrate import calibrate as run

    return show(run(tokens=tokens, rounds=rounds, world_size=ranks), json, print_rates)


def print_rates(result: dict[str, Any], console: Console) -> None:
    """Print each rate in a unit for people."""
    rates = result["rates"]
    told = {
        "attention": f"{rates['attention_flops_per_s'] / 1e9:,.1f} GFLOP/s",
        "one more segment": f"{rates['segment_s'] * 1e6:,.1f} us a pass",
        "matrix products": f"{rates['linear_flops_per_s'] / 1e9:,.1f} GFLOP/s",
        "link": f"{rates['near_bytes_per_s'] / 1e9:,.2f} GB/s each way",
        "an empty exchange": f"{rates['message_s'] * 1e6:,.0f} us",
    }
    for name, value in told.items():
        console.print(f"{name:<18}{value}", highlight=False, soft_wrap=True)


def straggler(*, tokens: int = 8192, ranks: int = 2, rounds: int = 5, json: bool = False) -> int:
    """Time the slowest rank's attention, contiguous against balanced, beside the prediction.

    Parameters
    ----------
    tokens
        Rows of the packed row; its document lengths are those of SQLite's documentation.
    ranks
        Local gloo ranks, one thread each.
    rounds
        Timed rounds, of which the least disturbed counts.
    json
        Print everything as JSON.
    """
    from longpack.bench.calibrate import run_straggler_bench

    return show(run_straggler_bench(tokens, ranks, rounds), json, print_straggler)


def print_straggler(result: dict[str, Any], console: Console) -> None:
    """Print times beside predictions."""
    predicted = result["predicted_ms"]
    lines = [
        f"{name:<12}{milliseconds:10,.1f} ms, predicted {predicted[name]:,.1f} ms, "
        f"area max/mean {result['imbalance'][name]:.2f}"
        for name, milliseconds in result["slowest_rank_ms"].items()
    ]
    ratios = f"{result['measured_ratio']:10.2f}, predicted {result['predicted_ratio']:.2f}"
    lines.append(f"ratio       {ratios}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
