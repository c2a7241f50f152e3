"""`longpack bench attention`, `documents`, `overhead` and `precision`: one rank's attention."""

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from longpack.cli.bench_show import show


def attention(*, tokens: int = 8192, rounds: int = 9, seed: int = 0, json: bool = False) -> int:
    """Time packed attention on one rank against a loop over documents and a dense mask.

    Parameters
    ----------
    tokens
        Rows of the packed row; its document lengths are those of SQLite's documentation.
    rounds
        Timed rounds; figures are medians.
    seed
        Picks the documents.
    json
        Print everything as JSON.
    """
    from longpack.bench.attention import run_attention_bench

    return show(run_attention_bench(tokens, rounds, seed), json, print_attention)


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


def documents(*, rounds: int = 15, seed: int = 0, json: bool = False) -> int:
    """Time packed attention on rows of long and of short documents against a loop over documents.

    Parameters
    ----------
    rounds
        Timed rounds; figures are medians.
    seed
        Picks documents.
    json
        Print everything as JSON.
    """
    from longpack.bench.documents import run_documents_bench

    return show(run_documents_bench(rounds, seed), json, print_documents)


def print_documents(result: dict[str, Any], console: Console) -> None:
    """Print a line a row: times, and paired ratios by wall and by processor time."""
    limits = result["limits"]
    console.print(
        "forward and backward, fp32, 9/3 heads of 64, one rank; results differ by "
        f"{result['largest_difference']:.0e} at most; ratios are paired, by wall and by processor "
        "time, over a loop over documents and over as many tokens in documents of 512",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("row")
    for column in (
        "tokens",
        "longpack ms",
        "loop ms",
        f"/ loop (<= {limits['over_loop']:g})",
        f"/ in 512s (<= {limits['over_long_documents']:g})",
    ):
        table.add_column(column, justify="right")
    for name, told in result["rows"].items():
        wall = told["median_ms"]["wall"]
        table.add_row(
            name,
            f"{told['tokens']:,}",
            f"{wall['longpack_flash']:,.1f}",
            f"{wall['document_loop']:,.1f}",
            _both_clocks(told["over_loop"], 3),
            _both_clocks(told["over_long_documents"], 2),
        )
    console.print(table)


def _both_clocks(ratios: dict[str, float] | None, digits: int) -> str:
    if ratios is None:
        return ""
    return f"{ratios['wall']:.{digits}f}, {ratios['processor']:.{digits}f}"


def overhead(*, rounds: int = 30, json: bool = False) -> int:
    """Time what a call of attention costs besides its kernels.

    Parameters
    ----------
    rounds
        Timed rounds; figures are medians.
    json
        Print everything as JSON.
    """
    from longpack.bench.overhead import run_overhead_bench

    return show(run_overhead_bench(rounds), json, print_overhead)


def print_overhead(result: dict[str, Any], console: Console) -> None:
    """Print microseconds, and the share of a long call."""
    lines = [
        f"kernels of 16 tokens, forward and backward  {result['kernels_us']:,.0f} us",
        f"longpack's call beyond them                 {result['fixed_us']:,.0f} us",
        f"torch's call beyond them                    {result['torch_fixed_us']:,.0f} us",
        f"share of a call of {result['long_tokens']:,} tokens             {result['share']:.3%} of "
        f"{result['long_call_ms']:,.0f} ms (limit {result['limit']:.0%})",
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def precision(*, tokens: int = 4096, json: bool = False) -> int:
    """Compare errors of bf16 attention split over ranks with those of one bf16 call.

    Parameters
    ----------
    tokens
        Rows of the one document that is split.
    json
        Print everything as JSON.
    """
    from longpack.bench.precision import run_precision_bench

    return show(run_precision_bench(tokens), json, print_precision)


def print_precision(result: dict[str, Any], console: Console) -> None:
    """Print each result's error, and for splits its ratio to one call's."""
    row = result["row"]
    console.print(
        f"error against fp64 (norm of the difference over the norm), {row['dtype']}, one document "
        f"of {row['tokens']:,} tokens, 9/3 heads of 64; in brackets over that of one call",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("ranks and layout")
    for name in result["single_error"]:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row("one call", *(f"{x:.2e}" for x in result["single_error"].values()))
    for split in result["splits"]:
        cells = [f"{x:.2e} ({split['over_single'][n]:.2f})" for n, x in split["error"].items()]
        table.add_row(f"{split['world_size']} {split['layout']}", *cells)
    console.print(table)
