"""What watching a training run costs: each part timed inside the steps of the real trainer."""

import json
import random
import statistics
import string
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from longpack.bench.lengths import draw_lengths, pack_row
from longpack.bench.timing import machine, on_threads
from longpack.blockdiag_cp import state
from longpack.plan import plan_step
from longpack.testing import World
from longpack.train.config import parse_config
from longpack.train.metrics import StepMetrics, Traffic, loads_of
from longpack.train.prepare import prepare
from longpack.train.ranks import join_ranks
from longpack.train.rows import Row
from longpack.train.trainer import RowRun, Trainer

CORPUS = "sqlite3_doc"
WARMUP = 2  # steps: the first ones allocate
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def run_watch_bench(
    steps: int = 12, row_tokens: int = 2048, worlds: tuple[int, ...] = (1, 2)
) -> dict[str, Any]:
    """Time a step of a small Llama and, inside it, everything that only watches.

    One row a step, the least work that watching is paid from. Ranks have one thread each.

    Args:
        steps: timed steps of each world.
        row_tokens: of a packed row; documents have the lengths of SQLite's documentation.
        worlds: cp ranks, each a run of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        _write_documents(Path(folder) / "documents.jsonl", row_tokens * (steps + WARMUP))
        runs = {cp: _run(cp, folder, steps, row_tokens) for cp in worlds}
    return {
        "machine": machine(),
        "steps": steps,
        "row_tokens": row_tokens,
        "model": MODEL,
        "cp": {str(cp): _figures(spent) for cp, spent in runs.items()},
        "large_row": count_large_row(),
    }


def count_large_row(row_tokens: int = 131_072, world_size: int = 64) -> dict[str, float]:
    """Time the count of a large row's traffic, and the plan that the count makes use of."""
    row = pack_row(CORPUS, row_tokens, seed=0)
    plan_ms, count_ms = [], []
    for _ in range(7):
        began = time.perf_counter()
        plan = plan_step(row, world_size, "balanced", "a2a")
        planned = time.perf_counter()
        loads_of([plan])
        plan_ms.append((planned - began) * 1e3)
        count_ms.append((time.perf_counter() - planned) * 1e3)
    return {
        "tokens": row_tokens,
        "world_size": world_size,
        "plan_ms": statistics.median(plan_ms),
        "count_ms": statistics.median(count_ms),
    }


class _TimedTrainer(Trainer):
    """The trainer with a clock around what watches."""

    def __init__(self, *args: Any) -> None:
        self.spent: dict[str, list[float]] = {}
        super().__init__(*args)

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Note the milliseconds that a part takes; on a GPU, until it is idle."""
        self._settle()
        began = time.perf_counter()
        yield
        self._settle()
        self.spent.setdefault(name, []).append((time.perf_counter() - began) * 1e3)

    def _settle(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def _counts(self, ran: list[RowRun]) -> torch.Tensor:
        with self.clock("attention calls and loads"):
            return super()._counts(ran)

    def _clip_gradients(self) -> float:
        with self.clock("gradient norm"):
            return super()._clip_gradients()

    def _traffic(self, loads: list[float], rows: list[Row]) -> Traffic:
        with self.clock("traffic and waste"):
            return super()._traffic(loads, rows)

    def _write(self, metrics: StepMetrics) -> None:
        with self.clock("line of metrics"):
            super()._write(metrics)


def _run(cp: int, folder: str, steps: int, row_tokens: int) -> dict[str, list[float]]:
    if cp == 1:
        with on_threads(1):
            return _time_steps(0, 1, folder, steps, row_tokens)
    world = World.start(cp, collective_timeout_s=600)
    try:
        return world.run(_time_steps, folder, steps, row_tokens, timeout_s=3600)[0]
    finally:
        world.kill()


def _time_steps(
    rank: int, world_size: int, folder: str, steps: int, row_tokens: int
) -> dict[str, list[float]]:
    """Return the milliseconds of each step and part, of one rank's run."""
    text = {
        "model": {"config": MODEL},
        "data": {"paths": ["documents.jsonl"], "row_length": row_tokens},
        "parallel": {"cp": world_size, "kv_exchange": "a2a"},
        "run": {"steps": steps + WARMUP, "folder": f"cp{world_size}", "save_every": 0},
    }
    config = parse_config(text, Path(folder))
    with join_ranks(config.parallel) as ranks:
        trainer = _TimedTrainer(prepare(config), ranks)
        todo = trainer.steps()
        for _ in range(steps + WARMUP):
            with trainer.clock("step"):
                next(todo)
            with trainer.clock("fire counter"):
                _fire(MODEL["num_hidden_layers"])
        trainer.finish()
    return {name: times[WARMUP:] for name, times in trainer.spent.items()}


def _fire(calls: int) -> None:
    """Do what a row does to the fire counter: a reset, a count a call, two readings."""
    state.reset_cp_attn_fire_count()
    for _ in range(calls):
        state._CP_ATTN_FIRE_COUNT[0] += 1
    for _ in range(2):
        state.cp_attn_fire_count()


def _figures(spent: dict[str, list[float]]) -> dict[str, Any]:
    """Return median milliseconds and, paired within steps, median shares."""
    step = spent.pop("step")
    shares = {n: [a / b for a, b in zip(t, step, strict=True)] for n, t in spent.items()}
    return {
        "step_ms": statistics.median(step),
        "parts": {
            name: {
                "median_ms": statistics.median(times),
                "share": statistics.median(shares[name]),
            }
            for name, times in spent.items()
        },
        "share": statistics.median(map(sum, zip(*shares.values(), strict=True))),
    }


def _write_documents(path: Path, tokens: int) -> None:
    """Write texts of real lengths, of random letters, for at least so many tokens."""
    source = random.Random(0)
    lengths = draw_lengths(CORPUS, 1 + tokens // 100, seed=0)
    with path.open("w", encoding="utf-8") as file:
        for length in lengths:
            text = "".join(source.choices(string.ascii_lowercase, k=length))
            file.write(json.dumps({"text": text}) + "\n")
