"""`longpack verify`: the doctor."""

import json as json_format
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from longpack.verify import Report


def verify(
    *,
    model: str,
    batch: str | None = None,
    corpus: tuple[Path, ...] = (),
    ranks: int = 2,
    layout: str = "contiguous",
    exchange: Literal["allgather", "halo", "a2a"] | None = None,
    backend: Literal["flash", "te", "dense"] | None = None,
    checkpointing: Literal["full", "reentrant", "as_is"] = "full",
    dtype: Literal["float32", "bfloat16", "float64"] | None = None,
    shard: str | None = None,
    forward: str | None = None,
    only: tuple[str, ...] = (),
    processes: bool = False,
    html: Path | None = None,
    json: bool = False,
) -> int:
    """Prove context parallelism on your model and data, or name what is wrong. Needs no GPU.

    Ranks are threads of this process. With --processes they are gloo processes; under torchrun
    they are its ranks, on GPUs where there are enough:

    torchrun --nproc-per-node 2 -m longpack verify --model MODULE:FUNCTION --ranks 2

    Exit code 1 where there is a finding.

    Parameters
    ----------
    model
        smollm2; the folder of a saved transformers model; a TOML file of config fields with
        model_type; or MODULE:FUNCTION, where FUNCTION() returns any torch module that is called
        as model(**inputs). What is too big is made smaller, and said.
    batch
        MODULE:FUNCTION, where FUNCTION(rank, world_size) is the batch that a rank loads. Default:
        documents of --corpus, of the standard library, or of random tokens.
    corpus
        Text files whose beginnings are the documents of the row.
    ranks
        Ranks that share the row.
    layout
        Who holds which rows, as in training.
    exchange
        How K/V travels; the configured one by default.
    backend
        The attention backend; the configured one by default.
    checkpointing
        How the model is checkpointed in training; as_is leaves the model's own.
    dtype
        Of parameters and computation; the model's own by default.
    shard
        MODULE:FUNCTION, your way from (batch, transport) to a rank's share.
    forward
        MODULE:FUNCTION, your call of the model: from (model, share), its outputs.
    only
        Names of the checks to run.
    processes
        Start gloo processes for the ranks.
    html
        Write the report with pictures as one page.
    json
        Print the report as JSON.
    """
    arguments = {
        "model": model,
        "batch": batch,
        "corpus": corpus,
        "layout": layout,
        "kv_exchange": exchange,
        "attn_backend": backend,
        "checkpointing": checkpointing,
        "dtype": dtype,
        "shard": shard,
        "forward": forward,
        "only": only,
    }
    if processes:
        from longpack.testing import World

        world = World.start(ranks)
        try:
            report = world.run(verify_on_rank, arguments, timeout_s=600)[0]
        finally:
            world.kill()
    elif "RANK" in os.environ:
        report = verify_on_rank(0, ranks, arguments)
    else:
        told = Console(stderr=True)
        tell = lambda name: told.print(f"checking {name}", highlight=False)  # noqa: E731
        report = _verify(arguments, world_size=ranks, tell=tell)
    if os.environ.get("RANK", "0") == "0":
        _show(report, html, json)
    return 0 if report.good else 1


def verify_on_rank(rank: int, world_size: int, arguments: dict[str, Any]) -> "Report":
    """Verify as one rank of a process group, joining torchrun's where there is none yet."""
    from longpack.train.config import ParallelSection
    from longpack.train.ranks import join_ranks

    with join_ranks(ParallelSection(cp=world_size)) as ranks:
        return _verify(arguments, cp_mesh=ranks.cp_mesh, device=ranks.device)


def _verify(arguments: dict[str, Any], **where: Any) -> "Report":
    import torch

    from longpack.verify import import_function, verify_model

    sys.path.insert(0, "")  # MODULE:FUNCTION is looked for where the command runs
    known = dict(arguments)
    for name in ("batch", "shard", "forward"):
        if known[name] is not None:
            known[name] = import_function(known[name])
    if known["dtype"] is not None:
        known["dtype"] = getattr(torch, known["dtype"])
    return verify_model(**known, **where)


def _show(report: "Report", html: Path | None, json: bool) -> None:
    if html is not None:
        from longpack.verify import write_page

        write_page(report, html)
    if json:
        print(json_format.dumps(report.to_dict(), indent=2, default=str))
    else:
        print_report(report, Console())


def print_report(report: "Report", console: Console) -> None:
    """Print every check, then every finding with its cause and remedy."""
    console.print(f"\n{report.about}", highlight=False)
    for note in report.notes:
        console.print(f"made smaller or left out: {note}", highlight=False)
    table = Table(show_lines=True)
    for heading in ("check", "", "measured"):
        table.add_column(heading)
    for result in report.results:
        word = "good" if not result.findings else "[bold red]finding[/]"
        table.add_row(result.name, word if result.ran else "[yellow]not run[/]", result.said)
    console.print(table)
    for number, finding in enumerate(report.findings, 1):
        console.print(
            f"\n[bold red]{number}. {finding.kind}[/] in [bold]{finding.where}[/]", highlight=False
        )
        for name in ("fact", "cause", "remedy"):
            console.print(f"   {name:7}", getattr(finding, name), highlight=False, markup=False)
    if report.good:
        console.print("no findings", style="green")
