"""`longpack plan`: what layouts would do to your documents."""

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from longpack.packing import PackedRow
    from longpack.plan_report import PlanReport


def plan(
    source: str,
    /,
    *,
    row_tokens: int | None = None,
    longest_tokens: int | None = None,
    ranks: int | None = None,
    ranks_per_node: int = 8,
    rows: int = 5,
    seed: int = 0,
    tokenizer: str | None = None,
    text_field: str = "text",
    layers: int = 32,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    linear_parameters: int = 218_103_808,
    element_bytes: int = 2,
    recompute: bool = False,
    near_gbytes_per_s: float = 300,
    far_gbytes_per_s: float = 40,
    rates: Path | None = None,
    tolerance: float = 1.05,
    plot: Path | None = None,
    exact: bool = False,
    dp: int = 1,
    window: int = 8,
    json: bool = False,
) -> int:
    """Compare layouts on your documents: balance, bytes, predicted times. Needs no GPU.

    Times are predictions from the rates of a machine; measure yours with `longpack bench
    calibrate --json`.

    Parameters
    ----------
    source
        Lengths as 4096,1000,250; a file of them (text, a JSON list, or a JSON histogram with
        bins and weights); the name of a corpus that longpack carries; a run file (.toml); or,
        with --tokenizer, a text, .jsonl or .parquet file or a folder of text files.
    row_tokens
        Tokens of a packed row; lengths on the command line and run files say their own.
    longest_tokens
        Longer documents are cut off here; a row by default.
    ranks
        Ranks of the cp axis; 8, or the run file's.
    ranks_per_node
        Of them, those that share a node.
    rows
        Packed rows to average over.
    seed
        Of the shuffles that pack them.
    tokenizer
        `bytes`, `smollm2` or a folder: tokenize the source.
    text_field
        JSON field or Parquet column that holds the text.
    layers, heads, kv_heads, head_dim, linear_parameters, element_bytes, recompute
        The model, per rank of the cp axis; an 8B Llama in bf16 by default.
    near_gbytes_per_s, far_gbytes_per_s
        A rank's link inside its node and beyond it.
    rates
        JSON of `longpack bench calibrate`; the links given here go before its own.
    tolerance
        Of --exact.
    plot
        Save a picture: the row by rank, and balance against traffic.
    exact
        Also solve the first row exactly, on a grid if it is long (needs scipy).
    dp
        Replicas with rows of their own: above 1, compare packing in order with packing in windows.
    window
        Steps whose documents are packed together.
    json
        Print everything as JSON.
    """
    from longpack.plan import LayerShape
    from longpack.plan_report import cost_model, load_documents, packing_effect, report

    documents = load_documents(source, tokenizer, text_field, seed)
    packed = documents.rows(row_tokens, rows, seed, longest_tokens)
    shape = LayerShape(
        layers, heads, kv_heads, head_dim, linear_parameters, element_bytes, recompute
    )
    model = cost_model(shape, rates, near_gbytes_per_s, far_gbytes_per_s, ranks_per_node)
    found = report(packed, ranks or documents.ranks or 8, model)
    gap = _gap(packed[0], found.world_size, tolerance) if exact else None
    effect = None
    if dp > 1 and not documents.is_row:
        lengths = [min(n, longest_tokens or found.row_tokens) for n in documents.lengths]
        effect = packing_effect(
            lengths, found.row_tokens, found.world_size, dp, window, model, found.best.name
        )
    if plot is not None:
        from longpack.plan_report.plot import plot_report

        plot_report(found, packed[0], plot)
    if json:
        extra = {"exact": gap, "packing": asdict(effect) if effect else None}
        print(json_format.dumps({**found.as_dict(), **extra}, indent=2))
    else:
        print_report(found, Console(width=max(Console().width, 100)))
        for told in (effect, gap and gap["told"]):
            if told:
                print(told)
    return 0


def _gap(row: "PackedRow", ranks: int, tolerance: float) -> dict[str, object]:
    from longpack.plan_report.exact import exact_gap

    gap = exact_gap(row, ranks, tolerance)
    return {**asdict(gap), "told": str(gap)}


def print_report(report: "PlanReport", console: Console) -> None:
    """Print one line a layout, and the recommendation."""
    console.print(
        f"{report.rows} rows of {report.row_tokens:,} tokens with {report.documents:,.0f} "
        f"documents on average, {report.world_size} ranks of {report.local_length:,} tokens.\n"
        "area: busiest rank over mean. MB: K/V received by a rank in one layer's forward pass, "
        "mean and busiest. segments: of a rank. ms: predicted, a whole step.",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("layout", no_wrap=True)
    for column in ("area", "MB", "worst", "segments", "attn ms", "exchange", "step"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in report.lines:
        table.add_row(
            line.name,
            f"{line.imbalance:.2f}",
            f"{line.received_bytes / 1e6:,.0f}",
            f"{line.received_bytes_worst / 1e6:,.0f}",
            f"{line.segments:,.0f}",
            *(_ms(x) for x in (line.attention_ms, line.exchange_ms, line.step_ms)),
            style="bold" if line is report.best else None,
        )
    console.print(table)
    for line in report.lines:
        if line.missed:
            console.print(f"{line.name}: {line.missed}", highlight=False, soft_wrap=True)
    for name, reason in report.left_out.items():
        console.print(f"{name}: left out, {reason}", highlight=False, soft_wrap=True)
    console.print(report.recommendation, highlight=False, soft_wrap=True)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
