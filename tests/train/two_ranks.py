"""A run on two ranks whose processes are ours: each can be made to fail, and its end is timed."""

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

from tests.train.runs import LLAMA, saved_in

from longpack.train.metrics import read_metrics

STEPS, ROW, SAVE_EVERY = 24, 96, 4

RUN_FILE = """
[model.config]
{model}
[model]
gradient_checkpointing = true
[data]
paths = ["documents"]
row_length = {row}
[parallel]
cp = 2
kv_exchange = "a2a"
device = "cpu"
timeout_s = {timeout_s}
[optimizer]
lr = 1e-2
[run]
steps = {steps}
save_every = {save_every}
folder = "{folder}"
"""

# What a rank runs that fails: `at(n, fault)` makes a function that fails on its n-th call.
PRELUDE = """
import errno, os, signal, sys, time
from pathlib import Path
from longpack.__main__ import main
from longpack.blockdiag_cp.overlap import StagedAttention
from longpack.train import checkpoint, rows, trainer

def struck():
    Path(os.environ["STRUCK"]).write_text(str(time.time()))

def at(n, fault, owner, name):
    plain, calls = getattr(owner, name), []
    def planted(*args, **kwargs):
        calls.append(1)
        if len(calls) == n:
            struck()
            return fault(plain, *args, **kwargs)
        return plain(*args, **kwargs)
    setattr(owner, name, planted)

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def stop(plain, *args, **kwargs):
    os.kill(os.getpid(), signal.SIGSTOP)
"""
FINALE = """
sys.argv = ["longpack", *sys.argv[1:]]
sys.exit(main())
"""


def write_run_file(folder, name, timeout_s=60):
    model = "\n".join(
        f"{k} = {v!r}" if isinstance(v, int) else f'{k} = "{v}"' for k, v in LLAMA.items()
    )
    path = folder / f"{name}.toml"
    path.write_text(
        RUN_FILE.format(
            model=model,
            folder=name,
            timeout_s=timeout_s,
            row=ROW,
            steps=STEPS,
            save_every=SAVE_EVERY,
        )
    )
    return path


@dataclass
class Ended:
    """How a rank's process ended: exit code, what it printed, and when."""

    code: int
    said: str
    at: float


@dataclass
class TwoRanks:
    """Two processes that train as torchrun starts them, watched to their ends."""

    processes: list[subprocess.Popen]
    ends: dict[int, Ended] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)

    @classmethod
    def start(cls, run_file, fault=None):
        """Start them; rank 1 runs `fault`, a program between `PRELUDE` and `FINALE`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        struck = {"STRUCK": str(run_file.with_suffix(".struck")), "OMP_NUM_THREADS": "1"}
        programs = [["-m", "longpack"], ["-m", "longpack"]]
        if fault is not None:
            programs[1] = ["-c", PRELUDE + fault + FINALE]
        ranks = cls(
            [
                subprocess.Popen(
                    [sys.executable, *program, "train", str(run_file), "--json"],
                    env={**os.environ, **world, **struck, "MASTER_PORT": port, "RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank, program in enumerate(programs)
            ]
        )
        for rank, process in enumerate(ranks.processes):
            thread = threading.Thread(target=ranks._watch, args=(rank, process))
            thread.start()
            ranks.threads.append(thread)
        return ranks

    def _watch(self, rank, process):
        said = process.communicate()[0]
        self.ends[rank] = Ended(process.returncode, said, time.time())

    def wait(self, rank, timeout_s=100):
        """Return how a rank ended; one that does not is killed with the other."""
        self.threads[rank].join(timeout_s)
        if rank not in self.ends:
            self.kill()
            raise AssertionError(f"rank {rank} did not end: {self.ends[rank].said}")
        return self.ends[rank]

    def kill(self):
        for process in self.processes:
            process.kill()
        for thread in self.threads:
            thread.join()

    def finish(self):
        """Wait for a good end; return what rank 0 said."""
        ends = [self.wait(0), self.wait(1)]
        assert [end.code for end in ends] == [0, 0], ends
        return ends[0].said


def check_resumed(folder, name, said):
    """The run went on and is, bit by bit, the one that nothing interrupted: every token once."""
    assert f'"steps": {STEPS}' in said
    ours, theirs = (read_metrics(folder / n / "metrics.jsonl") for n in (name, "whole"))
    assert [r["step"] for r in ours] == list(range(1, STEPS + 1))
    assert sum(r["tokens"] for r in ours) == STEPS * ROW
    assert [r["loss"] for r in ours] == [r["loss"] for r in theirs]
    assert [r["grad_norm"] for r in ours] == [r["grad_norm"] for r in theirs]
    assert saved_in(folder / name, STEPS) == saved_in(folder / "whole", STEPS)
