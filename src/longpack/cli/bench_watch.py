"""`longpack bench watch`."""

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from longpack.cli.bench_show import show


def watch(*, steps: int = 12, row_tokens: int = 2048, json: bool = False) -> int:
    """Time what the trainer does only to watch a run, as a share of a step.

    Parameters
    ----------
    steps
        Timed steps, on one rank and on two; figures are medians.
    row_tokens
        Rows of a packed row.
    json
        Print everything as JSON.
    """
    from longpack.bench.watch import run_watch_bench

    return show(run_watch_bench(steps, row_tokens), json, print_watch)


def print_watch(result: dict[str, Any], console: Console) -> None:
    """Print milliseconds and share of a step, part by part, for each world."""
    model, large = result["model"], result["large_row"]
    console.print(
        f"Llama of {model['num_hidden_layers']} layers of {model['hidden_size']}, one row of "
        f"{result['row_tokens']:,} tokens a step, {result['steps']} steps, ranks of one thread",
        highlight=False,
        soft_wrap=True,
    )
    worlds = result["cp"]
    table = Table(box=SIMPLE)
    table.add_column("watching")
    for cp in worlds:
        table.add_column(f"cp {cp} ms", justify="right")
        table.add_column("of a step", justify="right")
    for name in next(iter(worlds.values()))["parts"]:
        parts = [told["parts"][name] for told in worlds.values()]
        cells = [(f"{p['median_ms']:.3f}", f"{p['share']:.4%}") for p in parts]
        table.add_row(name, *(cell for pair in cells for cell in pair))
    told = [(f"{w['step_ms']:.1f}", f"{w['share']:.4%}") for w in worlds.values()]
    table.add_row("a step, and all of it", *(cell for pair in told for cell in pair))
    console.print(table)
    console.print(
        f"counting a row of {large['tokens']:,} tokens over {large['world_size']} ranks: "
        f"{large['count_ms']:.2f} ms, beside {large['plan_ms']:.2f} ms to plan it",
        highlight=False,
        soft_wrap=True,
    )
