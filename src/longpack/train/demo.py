"""The demo: the same documents and model on one rank and on two, side by side."""

import html.parser
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longpack.errors import RunError
from longpack.train.metrics import read_metrics
from longpack.train.plot import plot_losses
from longpack.train.probe import BoundaryProbe
from longpack.train.trainer import load_summary

SQLITE_DOCS = Path("/usr/share/doc/sqlite3-doc")  # where Debian's package puts them
NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
MARKER = "longpack-demo.json"  # says that a folder may be replaced by the next demo

# float32 sums of two ranks are rounded in another order than one rank's, which training may
# amplify. Measured over the default steps: 1e-6, both models.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Demo:
    """What a demo trains.

    Args:
        about: one line for people.
        model: the `[model]` table.
        tokenizer: of the `[data]` table.
        row_length: tokens.
        longest_file: documents up to this many bytes are taken, so that a row holds several.
        lr, steps: of the run.
    """

    about: str
    model: dict[str, Any]
    tokenizer: str
    row_length: int
    longest_file: int
    lr: float
    steps: int


DEMOS = {
    "tiny": Demo(
        about="a small Llama on packed real documents",
        model={
            "config": {
                "model_type": "llama",
                "hidden_size": 128,
                "intermediate_size": 352,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            }
        },
        tokenizer="bytes",
        row_length=4096,
        longest_file=6000,
        lr=3e-3,
        steps=40,
    ),
    "smollm2": Demo(
        about="SmolLM2-135M, real weights, on packed real documents",
        model={"name": "smollm2", "gradient_checkpointing": True},
        tokenizer="smollm2",
        row_length=384,
        longest_file=900,
        lr=2e-5,
        steps=4,
    ),
}


@dataclass(frozen=True)
class DemoReport:
    """What the demo found.

    Args:
        about: what trained.
        folder: of the runs.
        plot: the PNG.
        losses_cp1, losses_cp2: loss of every step on one rank and on two.
        tokens_per_s_cp1, tokens_per_s_cp2: median over steps.
        kv_bytes_mean, kv_bytes_max: K/V bytes received in a step's forward, on two ranks, by the
            mean and the busiest rank; mean over steps and largest step.
        kv_bytes_gather: the same for `kv_exchange = "allgather"`.
        probe: the boundary probe on two ranks.
        tolerance: largest loss difference that counts as rounding.
    """

    about: str
    folder: Path
    plot: Path
    losses_cp1: list[float]
    losses_cp2: list[float]
    tokens_per_s_cp1: float
    tokens_per_s_cp2: float
    kv_bytes_mean: float
    kv_bytes_max: float
    kv_bytes_gather: float
    probe: BoundaryProbe
    tolerance: float = TOLERANCE

    @property
    def largest_difference(self) -> float:
        """Largest difference of the losses at one step."""
        pairs = zip(self.losses_cp1, self.losses_cp2, strict=True)
        return max(abs(one - two) for one, two in pairs)

    @property
    def losses_agree(self) -> bool:
        """Say whether the difference is rounding."""
        return self.largest_difference <= self.tolerance

    @property
    def good(self) -> bool:
        """Say whether the losses agree and documents are apart."""
        return self.losses_agree and self.probe.held


def run_demo(
    model: str, steps: int | None, out: Path, tell: Callable[[str], None] = lambda line: None
) -> DemoReport:
    """Train on one rank and on two, and compare.

    Args:
        model: a name in `DEMOS`.
        steps: of each run; the demo's own by default.
        out: folder that is made, or replaced where it holds an earlier demo.
        tell: called with lines about what happens.

    Raises:
        RunError: `out` holds something else, or a run failed.
    """
    chosen = DEMOS[model]
    out = out.resolve()
    _claim(out)
    count, size = collect_documents(out / "documents", chosen.longest_file)
    tell(f"{count} real documents, {size / 1e3:,.0f} kB, none over {chosen.longest_file:,} B")
    for cp in (1, 2):
        tell(f"{cp} rank{'s' * (cp > 1)}:")
        _write_run_file(out / f"cp{cp}.toml", chosen, cp, steps or chosen.steps)
        _launch(out / f"cp{cp}.toml", cp)
    return _report(chosen, out)


def collect_documents(folder: Path, longest_file: int) -> tuple[int, int]:
    """Copy the documents of the demo into a folder; return how many, and their bytes.

    The standard library's sources without its tests, and the text of SQLite's documentation
    where it is installed, each up to `longest_file` bytes and not empty.
    """
    folder.mkdir(parents=True)
    count = size = 0
    for name, text in _documents():
        content = text.encode()
        if text.strip() and len(content) <= longest_file:
            (folder / f"{name}.txt").write_bytes(content)
            count, size = count + 1, size + len(content)
    return count, size


def _documents() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not NOT_SOURCES & set(parts):
            yield ".".join(parts), path.read_text(encoding="utf-8", errors="replace")
    for path in sorted(SQLITE_DOCS.rglob("*.html")):
        yield f"sqlite.{path.stem}", _text_of(path.read_text(encoding="utf-8", errors="replace"))


def _text_of(page: str) -> str:
    """Return the text of an HTML page, without scripts and styles."""
    pieces: list[str] = []
    hidden: list[str] = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag in ("script", "style"):
                hidden.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if hidden and tag == hidden[-1]:
                hidden.pop()

        def handle_data(self, data: str) -> None:
            if not hidden:
                pieces.append(data)

    Reader().feed(page)
    lines = (line.strip() for line in "".join(pieces).splitlines())
    return "\n".join(line for line in lines if line)


def _claim(out: Path) -> None:
    """Make an empty folder, replacing an earlier demo and nothing else."""
    if out.exists():
        if not (out / MARKER).is_file() and (not out.is_dir() or any(out.iterdir())):
            raise RunError(f"--out {out} exists and is no earlier demo: name a new folder")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARKER).write_text("{}\n")


def _write_run_file(path: Path, demo: Demo, cp: int, steps: int) -> None:
    model = dict(demo.model)
    tables = {
        "model": model,
        "model.config": model.pop("config", {}),
        "data": {
            "paths": ["documents"],
            "tokenizer": demo.tokenizer,
            "row_length": demo.row_length,
        },
        "parallel": {"cp": cp, "kv_exchange": "a2a", "device": "cpu"},
        "optimizer": {"lr": demo.lr, "warmup": 4, "grad_clip": 1.0},
        "run": {
            "steps": steps,
            "folder": path.stem,
            "save_every": 0,
            "boundary_probe": True,
        },
    }
    lines = [f"# torchrun --nproc-per-node {cp} -m longpack train {path.name}"]
    for name, fields in tables.items():
        if fields:
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
    path.write_text("\n".join(lines) + "\n")


def _launch(run_file: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "longpack", "train", str(run_file), "--json"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # a fair comparison on few cores
    ended = subprocess.run(command, env=one_thread, stdout=subprocess.DEVNULL, check=False)
    if ended.returncode:
        raise RunError(
            f"the run on {ranks} ranks ended with exit code {ended.returncode}; its message is "
            f"above, and this repeats it: {' '.join(command[1:])}"
        )


def _report(demo: Demo, out: Path) -> DemoReport:
    one, two = (read_metrics(out / f"cp{cp}" / "metrics.jsonl") for cp in (1, 2))
    summaries = [load_summary(out / f"cp{cp}") for cp in (1, 2)]
    losses = [[record["loss"] for record in records] for records in (one, two)]
    probe = summaries[1].probe
    assert probe is not None
    plot = plot_losses(losses[0], losses[1], demo.about, out / "losses.png")
    return DemoReport(
        about=demo.about,
        folder=out,
        plot=plot,
        losses_cp1=losses[0],
        losses_cp2=losses[1],
        tokens_per_s_cp1=summaries[0].tokens_per_s,
        tokens_per_s_cp2=summaries[1].tokens_per_s,
        kv_bytes_mean=sum(r["kv_bytes_mean"] for r in two) / len(two),
        kv_bytes_max=max(r["kv_bytes_max"] for r in two),
        kv_bytes_gather=two[0]["kv_bytes_gather"],
        probe=probe,
    )
