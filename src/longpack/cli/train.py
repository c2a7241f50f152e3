"""`longpack train`."""

import dataclasses
import json as json_format
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from longpack.train.metrics import StepMetrics
    from longpack.train.trainer import RunSummary


def train(run_file: Path, /, *, json: bool = False) -> int:
    """Train as a run file says. Start it under torchrun, or by itself for one rank.

    torchrun --nproc-per-node 2 -m longpack train RUN.toml

    The same command goes on after a kill. See examples/ for run files.

    Parameters
    ----------
    run_file
        TOML: [model], [data], [parallel], [optimizer], [run].
    json
        Print the summary as JSON.
    """
    from longpack.train import load_config
    from longpack.train import train as run

    config = load_config(run_file)
    first = os.environ.get("RANK", "0") == "0"
    bar = Bar(config.run.steps, Console(stderr=True)) if first else None
    if bar is None:
        run(config)
        return 0
    with bar:
        summary = run(config, on_begin=bar.begin, on_step=bar.step)
    if json:
        print(json_format.dumps(dataclasses.asdict(summary), indent=2))
    else:
        print_summary(summary, Console())
    return 0


class Bar:
    """A progress bar of steps with the latest loss.

    Args:
        steps: of the whole run.
        console: where to draw.
    """

    def __init__(self, steps: int, console: Console) -> None:
        self._progress = Progress(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", total=steps)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, about: str, step: int) -> None:
        """Say what trains, and from which step it goes on."""
        self._progress.console.print(about, highlight=False, soft_wrap=True)
        if step:
            self._progress.console.print(f"going on after step {step}", highlight=False)
        self._progress.update(self._task, completed=step)
        self._progress.start()

    def step(self, metrics: "StepMetrics") -> None:
        """Show one step."""
        self._progress.update(
            self._task,
            completed=metrics.step,
            description=f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tokens/s",
        )


def print_summary(summary: "RunSummary", console: Console) -> None:
    """Print how a run ended."""
    lines = [
        f"loss {summary.first_loss:.4f} -> {summary.last_loss:.4f} in {summary.steps} steps, "
        f"{summary.tokens_per_s:,.0f} tokens/s",
        f"metrics, summary and checkpoints: {summary.folder}",
    ]
    if summary.skipped:
        name, why = next(iter(summary.skipped.items()))
        lines.append(f"{len(summary.skipped)} documents skipped, the first: {name} {why}")
    if summary.probe is not None:
        word = "held" if summary.probe.held else "DID NOT HOLD"
        lines.append(
            f"boundaries {word}: changing one document moved its own logits by up to "
            f"{summary.probe.moved_inside:.3g} and all others' by {summary.probe.moved_outside:g}"
        )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
