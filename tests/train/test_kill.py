"""kill -9 of a run on two ranks, and the same command again: nothing lost, nothing twice."""

import os
import signal
import socket
import subprocess
import sys
import time

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


def start(run_file):
    """Start two ranks as torchrun does, but as children of ours that can be killed one by one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "longpack", "train", str(run_file), "--json"],
            env={**os.environ, **world, "MASTER_PORT": port, "RANK": rank, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
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


def test_kill_and_resume_is_bitwise_the_uninterrupted_run(tmp_path):
    write_documents(tmp_path / "documents")
    whole, killed = (write_run_file(tmp_path, name) for name in ("whole", "killed"))
    finish(start(whole))
    metrics = tmp_path / "killed" / "metrics.jsonl"
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
    assert '"steps": 60' in said
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("killed", "whole"))
    assert [r["step"] for r in ours] == list(range(1, 61))
    assert sum(r["tokens"] for r in ours) == 60 * 96
    assert [r["loss"] for r in ours] == [r["loss"] for r in theirs]
    assert [r["grad_norm"] for r in ours] == [r["grad_norm"] for r in theirs]
    assert saved_in(tmp_path / "killed", 60) == saved_in(tmp_path / "whole", 60)
