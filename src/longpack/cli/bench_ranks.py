"""`longpack bench ranks`."""

import json as json_format
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table


def ranks(
    *,
    tokens: int = 16384,
    longest: int | None = None,
    world_size: int = 2,
    rounds: int = 7,
    seed: int = 0,
    dense: bool = False,
    json: bool = False,
) -> int:
    """Time packed attention over gloo ranks against what people do today.

    Parameters
    ----------
    tokens
        Rows of the packed row; its document lengths are those of SQLite's documentation.
    longest
        Longer documents are cut; a quarter of the row by default.
    world_size
        Ranks, of one thread each; give every one a core.
    rounds
        Timed rounds; figures are medians.
    seed
        Picks the documents.
    dense
        Also time one call with a dense mask on two threads: half a minute a call at 16K rows.
    json
        Print everything as JSON.
    """
    from longpack.bench.ranks import run_ranks_bench

    result = run_ranks_bench(tokens, world_size, rounds, seed, longest=longest, dense=dense)
    if json:
        print(json_format.dumps(result, indent=2))
    else:
        print_ranks(result, Console())
    return 0


def print_ranks(result: dict[str, Any], console: Console) -> None:
    """Print times and paired ratios, with the row's quantities that they depend on."""
    row, machine = result["row"], result["machine"]
    console.print(
        f"forward and backward, fp32, {len(row['lengths'])} documents in {row['tokens']:,} tokens, "
        f"{machine['ranks']} ranks of one thread; square of the row over the documents' area "
        f"{result['square_over_area']:.1f}; results differ by {result['largest_difference']:.0e} "
        "at most",
        highlight=False,
        soft_wrap=True,
    )
    even = result["divisible_heads"]
    for heads, times, ratios in (
        ("9/3", result["median_ms"], result["over_balanced"]),
        ("/".join(map(str, even["heads"])), even["median_ms"], even["over_balanced"]),
    ):
        table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False, title=f"{heads} heads of 64")
        for column in ("attention", "median ms", "/ balanced a2a", "area max/mean", "received"):
            table.add_column(column, justify="left" if column == "attention" else "right")
        for name, median_ms in sorted(times.items(), key=lambda item: item[1]):
            over = f"{ratios[name]:.2f}" if name in ratios else ""
            area, received = result["imbalance"].get(name), result["received_tokens"].get(name)
            table.add_row(
                name.replace("_", " "),
                f"{median_ms:,.0f}",
                over,
                "" if area is None else f"{area:.2f}",
                "" if received is None else f"{received:,}",
            )
        console.print(table)
    for name, reason in result["not_run"].items():
        console.print(f"not run: {name}: {reason}", highlight=False, soft_wrap=True)
    loop = 1 / result["processor_over_balanced"]["document_loop"]
    hidden, waited = (result["exposed_ms"][name] for name in ("hidden", "waited"))
    console.print(
        f"balanced a2a / document loop on one thread: {result['balanced_over_document_loop']:.3f}, "
        f"in processor time of the busiest rank {loop:.3f}\n"
        f"waited for a link slowed by {result['delay_ms']:g} ms, both ways: {hidden:.1f} ms with "
        f"overlap, {waited:.1f} ms without",
        highlight=False,
        soft_wrap=True,
    )
