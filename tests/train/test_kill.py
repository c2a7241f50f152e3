"""kill -9 of a run on two ranks, and the same command again: nothing lost, nothing twice."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from tests.train.runs import LLAMA, saved_in, write_documents

from longpack.train.metrics import read_metrics

RUN_FILE = """
[model.config]
{model}
[data]
paths = ["documents"]
row_length = 96
[parallel]
cp = 2
kv_exchange = "a2a"
device = "cpu"
[optimizer]
lr = 1e-2
[run]
steps = 60
save_every = 4
folder = "{folder}"
"""


# Trains as `longpack train` does, but dies in its second save, shards written, nothing renamed.
DIES_WHILE_SAVING = """
import os, signal, sys
from longpack.__main__ import main
from longpack.train import checkpoint
write, saves = checkpoint.save_shards, []
def write_and_die(*args, **kwargs):
    write(*args, **kwargs)
    saves.append(1)
    if len(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save_shards = write_and_die
sys.argv = ["longpack", *sys.argv[1:]]
main()
"""


def start(run_file, **code):
    """Start two ranks as torchrun does, but as children of ours that can be killed one by one.

    Args:
        code: by `rank0`, `rank1`: what a rank runs in place of `longpack`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    programs = [["-c", code[r]] if r in code else ["-m", "longpack"] for r in ("rank0", "rank1")]
    return [
        subprocess.Popen(
            [sys.executable, *program, "train", str(run_file), "--json"],
            env={**os.environ, **world, "MASTER_PORT": port, "RANK": rank, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, program in zip(("0", "1"), programs, strict=True)
    ]


def write_run_file(folder, name):
    model = "\n".join(
        f"{k} = {v!r}" if isinstance(v, int) else f'{k} = "{v}"' for k, v in LLAMA.items()
    )
    path = folder / f"{name}.toml"
    path.write_text(RUN_FILE.format(model=model, folder=name))
    return path


def finish(ranks):
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return said[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of documents, a run file and its run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs")
    write_documents(folder / "documents")
    finish(start(write_run_file(folder, "whole")))
    return folder


def check_resumed(folder, name, said):
    """The run went on and is, bit by bit, the one that nothing interrupted."""
    assert '"steps": 60' in said
    ours, theirs = (read_metrics(folder / n / "metrics.jsonl") for n in (name, "whole"))
    assert [r["step"] for r in ours] == list(range(1, 61))
    assert sum(r["tokens"] for r in ours) == 60 * 96
    assert [r["loss"] for r in ours] == [r["loss"] for r in theirs]
    assert [r["grad_norm"] for r in ours] == [r["grad_norm"] for r in theirs]
    assert saved_in(folder / name, 60) == saved_in(folder / "whole", 60)


def test_kill_and_resume_is_bitwise_the_uninterrupted_run(whole):
    killed = write_run_file(whole, "killed")
    metrics = whole / "killed" / "metrics.jsonl"
    ranks = start(killed)
    deadline = time.monotonic() + 100
    while len(read_metrics(metrics)) < 10 and ranks[0].poll() is None:
        assert time.monotonic() < deadline, "no ten steps"
        time.sleep(0.005)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * 2
    assert 10 <= len(read_metrics(metrics)) < 60
    said = finish(start(killed))
    assert '"resumed_from": 0' not in said
    check_resumed(whole, "killed", said)


@pytest.mark.parametrize("rank", [1])
def test_a_rank_killed_while_saving_loses_nothing_saved(rank, whole):
    name = f"rank{rank}"
    torn = write_run_file(whole, name)
    ranks = start(torn, **{name: DIES_WHILE_SAVING})
    said = [r.communicate(timeout=120)[0] for r in ranks]
    assert ranks[rank].returncode == -signal.SIGKILL, said
    assert ranks[1 - rank].returncode not in (0, -signal.SIGKILL), said  # told, not hung
    kept = sorted(p.name for p in (whole / name / "checkpoints").iterdir())
    assert kept == [".partial", "step-00000004"]
    said = finish(start(torn))
    assert '"resumed_from": 4' in said
    check_resumed(whole, name, said)
