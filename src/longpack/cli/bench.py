"""`longpack bench`: one command a measurement."""

import json as json_format
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.table import Table

from longpack.cli.bench_layouts import calibrate, layouts, straggler
from longpack.cli.bench_ranks import ranks

bench = App(name="bench", help="Measure on this machine, against what people do today.")
bench.command(layouts)
bench.command(calibrate)
bench.command(straggler)
bench.command(ranks)


@bench.command
def attention(
    *,
    tokens: int = 8192,
    rounds: int = 9,
    seed: int = 0,
    memory: bool = True,
    json: bool = False,
) -> int:
    """Time packed attention on one rank against a loop over documents and a dense mask.

    Parameters
    ----------
    tokens
        Rows of the packed row; its document lengths are those of SQLite's documentation.
    rounds
        Timed rounds; figures are medians.
    seed
        Picks the documents.
    memory
        Also measure peak memory over growing rows.
    json
        Print everything as JSON.
    """
    from longpack.bench.attention import run_attention_bench

    result = run_attention_bench(tokens, rounds, seed, memory)
    if json:
        print(json_format.dumps(result, indent=2))
    else:
        print_attention(result, Console())
    return 0


def print_attention(result: dict[str, Any], console: Console) -> None:
    """Print times, ratios and the fraction of the machine's rate."""
    row = result["row"]
    console.print(
        f"forward and backward, fp32, 9/3 heads of 64, {len(row['lengths'])} documents in "
        f"{row['tokens']:,} tokens",
        highlight=False,
    )
    table = Table()
    table.add_column("attention")
    table.add_column("median ms", justify="right")
    for name, median_ms in result["median_ms"].items():
        table.add_row(name.replace("_", " "), f"{median_ms:,.1f}")
    console.print(table)
    fraction = result["fraction_of_matmul_rate"]
    lines = [
        f"longpack / document loop  {result['longpack_over_document_loop']:.3f}",
        f"dense mask / longpack     {result['dense_mask_over_longpack']:.2f}",
        f"largest difference        {result['largest_difference']:.1e}",
        f"rate                      {result['attention_gflops']:,.0f} GFLOP/s, {fraction:.0%} of "
        f"this machine's {result['matmul_gflops']:,.0f} in a matmul",
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    for name, peaks in result["peak_bytes"].items():
        shown = ", ".join(f"{int(t):,} tokens {b / 1e6:,.0f} MB" for t, b in peaks.items())
        console.print(f"peak memory, {name}: {shown}", highlight=False, soft_wrap=True)


@bench.command
def replay(*, rounds: int = 30, json: bool = False) -> int:
    """Time a checkpointed call and a decision on top of plain checkpointing, and count bytes.

    Parameters
    ----------
    rounds
        Timed rounds; figures are medians of differences within a round.
    json
        Print everything as JSON.
    """
    from longpack.bench.replay import run_replay_bench

    result = run_replay_bench(rounds)
    if json:
        print(json_format.dumps(result, indent=2))
    else:
        print_replay(result, Console())
    return 0


def print_replay(result: dict[str, Any], console: Console) -> None:
    """Print microseconds with their share of an empty checkpointed block, and bytes."""
    empty_us = result["empty_checkpointed_block_us"]
    console.print(f"empty checkpointed block: {empty_us:.1f} us", highlight=False)
    times = Table("on top of it")
    times.add_column("us", justify="right")
    times.add_column("share", justify="right")
    for name in ("call", "decision", "decision_preserve_random_false"):
        extra = result[name]
        share = f"{extra['share_of_empty_block']:.1%}"
        times.add_row(name.replace("_", " "), f"{extra['extra_us']:.1f}", share)
    console.print(times)
    kept = Table("bytes of a record")
    for column in ("plain", "with codec"):
        kept.add_column(column, justify="right")
    for name, sizes in result["record_bytes"].items():
        kept.add_row(name, f"{sizes['plain']:,}", f"{sizes['codec']:,}")
    console.print(kept)
    dispatch = result["expert_dispatch_on_2_gloo_ranks"]
    console.print(
        f"expert dispatch on 2 gloo ranks: {dispatch['replayed']:.1f} ms replayed, "
        f"{dispatch['decided_twice']:.1f} ms decided twice",
        highlight=False,
        soft_wrap=True,
    )
