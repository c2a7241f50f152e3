"""kill -9 of a torchrun run, and the same command again: nothing lost, nothing twice."""

import os
import signal
import subprocess
import sys
import time

from tests.train.runs import LLAMA, write_documents

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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "longpack", "train", str(run_file), "--json"]
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def write_run_file(folder, name):
    model = "\n".join(
        f"{k} = {v!r}" if isinstance(v, int) else f'{k} = "{v}"' for k, v in LLAMA.items()
    )
    path = folder / f"{name}.toml"
    path.write_text(RUN_FILE.format(model=model, folder=name))
    return path


def finish(process):
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said


def test_kill_and_resume_is_bitwise_the_uninterrupted_run(tmp_path):
    write_documents(tmp_path / "documents")
    whole, killed = (write_run_file(tmp_path, name) for name in ("whole", "killed"))
    finish(start(whole))
    metrics = tmp_path / "killed" / "metrics.jsonl"
    process = start(killed)
    deadline = time.monotonic() + 100
    while len(read_metrics(metrics)) < 10 and process.poll() is None:
        assert time.monotonic() < deadline, "no ten steps"
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = len(read_metrics(metrics))
    assert 10 <= before < 60
    assert '"resumed_from": 0' not in finish(start(killed))
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("killed", "whole"))
    assert [r["step"] for r in ours] == list(range(1, 61))
    assert sum(r["tokens"] for r in ours) == 60 * 96
    assert [r["loss"] for r in ours] == [r["loss"] for r in theirs]
    assert [r["grad_norm"] for r in ours] == [r["grad_norm"] for r in theirs]
    ends = [
        tmp_path / name / "checkpoints/step-00000060/progress.json" for name in ("killed", "whole")
    ]
    assert ends[0].read_text() == ends[1].read_text()
