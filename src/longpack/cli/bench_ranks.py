"""`longpack bench ranks`."""

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from longpack.cli.bench_show import show


def ranks(
    *,
    tokens: int = 16384,
    longest: int | None = None,
    world_size: int = 2,
    rounds: int = 7,
    seed: int = 0,
    least_imbalance: float = 1.0,
    only: str = "",
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
    least_imbalance
        Take the first seed from --seed on whose row is at least so uneven (area max/mean) in the
        contiguous layout.
    only
        Contenders to time beside balanced_a2a, with commas between them; all by default.
    dense
        Also time one call with a dense mask on two threads: half a minute a call at 16K rows.
    json
        Print everything as JSON.
    """
    from longpack.bench.ranks import run_ranks_bench

    result = run_ranks_bench(
        tokens,
        world_size,
        rounds,
        seed,
        longest,
        dense,
        only=[name for name in only.split(",") if name],
        least_imbalance=least_imbalance,
    )
    return show(result, json, print_ranks)


def print_ranks(result: dict[str, Any], console: Console) -> None:
    """Print times and paired ratios, with the row's quantities that they depend on."""
    row, machine = result["row"], result["machine"]
    console.print(
        f"forward and backward, fp32, {len(row['lengths'])} documents in {row['tokens']:,} tokens "
        f"(seed {row['seed']}), {machine['ranks']} ranks of one thread; square of the row over "
        f"the documents' area {result['square_over_area']:.1f}; results differ by "
        f"{result['largest_difference']:.0e} at most",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_heads_table("9/3 heads of 64", result, result))
    even = result["divisible_heads"]
    if even:
        console.print(
            _heads_table("/".join(map(str, even["heads"])) + " heads of 64", even, result)
        )
    lines = [f"not run: {name}: {reason}" for name, reason in result["not_run"].items()]
    if result["exposed_ms"]:
        hidden, waited = (result["exposed_ms"][name] for name in ("hidden", "waited"))
        lines.append(
            f"waited for a link slowed by {result['delay_ms']:g} ms, both ways: {hidden:.1f} ms "
            f"with overlap, {waited:.1f} ms without"
        )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _heads_table(title: str, timed: dict[str, Any], result: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False, title=title)
    table.add_column("attention")
    for column in ("median ms", "/ balanced a2a", "processor time", "area max/mean", "received"):
        table.add_column(column, justify="right")
    for name, median_ms in sorted(timed["median_ms"].items(), key=lambda item: item[1]):
        received = result["received_tokens"].get(name)
        table.add_row(
            name.replace("_", " "),
            f"{median_ms:,.0f}",
            _two_digits(timed["over_balanced"].get(name)),
            _two_digits(timed["processor_over_balanced"].get(name)),
            _two_digits(result["imbalance"].get(name)),
            "" if received is None else f"{received:,}",
        )
    return table


def _two_digits(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"
