"""A rank dies, raises, stalls, lags or holds other data: every rank ends and says why, and the
same command goes on with nothing lost but the steps since the last save, and nothing twice.

Run with `-s` for the table of docs/faults.md: fault, what rank 0 says, seconds until all ended.
"""

import signal
import time
from dataclasses import dataclass

import pytest
from tests.train.runs import write_documents
from tests.train.two_ranks import STEPS, TwoRanks, check_resumed, write_run_file

from longpack.train.metrics import read_metrics

TIMEOUT_S = 8  # of a collective, where the fault is that a rank does not come
IN_FORWARD, IN_BACKWARD = "StagedAttention, 'forward'", "StagedAttention, 'backward'"
CALL = 41  # two layers, forward and recompute: the forward of layer 0 in step 11


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong on rank 1 of 2, in step 11 or in the second save.

    Args:
        program: planted in rank 1.
        says: what rank 0 must say, in order.
        also: what rank 1 must say.
        saved: the step that the run goes on from.
        timeout_s: how long ranks wait for each other.
        code: exit status of rank 1; None for one that has to be killed.
    """

    program: str
    says: tuple[str, ...]
    also: str = ""
    saved: int = 8
    timeout_s: float = 60
    code: int | None = 2


GONE = "rank 1 has ended, its process is gone"
FAULTS = {
    "killed in forward": Fault(
        f"at({CALL}, kill, {IN_FORWARD})",
        ("layer 0 of batch 11", "forward) failed after", "waiting for rank 1", GONE, "step 11"),
        code=-signal.SIGKILL,
    ),
    "killed in recompute": Fault(
        f"at({CALL + 2}, kill, {IN_FORWARD})",
        ("layer 1 of batch 11", "recompute) failed after", GONE, "step 11"),
        code=-signal.SIGKILL,
    ),
    "killed in backward": Fault(
        f"at(21, kill, {IN_BACKWARD})",
        ("layer 1 of batch 11", "backward) failed after", GONE, "step 11"),
        code=-signal.SIGKILL,
    ),
    "killed while saving": Fault(
        "at(2, lambda plain, *a, **k: (plain(*a, **k), kill()), checkpoint, 'save_shards')",
        ("all_gather_object (save) failed after", GONE, "step 8"),
        saved=4,
        code=-signal.SIGKILL,
    ),
    "stopped in forward": Fault(
        f"at({CALL}, stop, {IN_FORWARD})",
        ("layer 0 of batch 11", "rank 1 gives no answer in 2 s: its process is stopped"),
        timeout_s=TIMEOUT_S,
        code=None,
    ),
    "late by more than the timeout": Fault(
        f"def dawdle(plain, *a, **k):\n    time.sleep(600)\nat({CALL}, dawdle, {IN_FORWARD})",
        ("layer 0 of batch 11", "waiting for rank 1", "rank 1 has started operation", "in dawdle"),
        timeout_s=TIMEOUT_S,
        code=None,
    ),
    "raises in attention": Fault(
        "def fail(plain, *a, **k):\n    raise ArithmeticError('planted')\n"
        f"at({CALL}, fail, {IN_FORWARD})",
        ("layer 0 of batch 11", "rank 1 ended with ArithmeticError: planted", "step 11"),
        also="ArithmeticError: planted",
        code=1,
    ),
    "other tokens": Fault(
        "def other(plain, *a, **k):\n    made, after = plain(*a, **k)\n"
        "    made[0].tokens[5] += 1\n    return made, after\n"
        "at(11, other, rows.RowPacker, 'rows')",
        ("ranks hold different batches", "input_ids, labels of rank 1 and of rank 0"),
        also="ranks hold different batches",
    ),
    "other documents": Fault(
        "def other(plain, *a, **k):\n    plain(*a, **k)\n    return plain(a[0], "
        "rows.Cursor(0, 2, 0), *a[2:])\n"
        "at(11, other, rows.RowPacker, 'rows')",
        ("ranks hold different batches", "document 0 covers rows"),
        also="ranks hold different batches",
    ),
    "disk full while saving": Fault(
        "import resource\n"
        "def fill(plain, *a, **k):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n    return plain(*a, **k)\n"
        "at(2, fill, checkpoint, 'save_shards')",
        ("step-00000008 cannot be written: on rank 1: File too large",),
        also="File too large",
        saved=4,
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of documents, a run file and its run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs")
    write_documents(folder / "documents")
    TwoRanks.start(write_run_file(folder, "whole")).finish()
    return folder


@pytest.fixture(scope="module")
def table():
    """Lines that `-s` shows at the end."""
    lines = ["", "| rank 1 | rank 0 | seconds |", "|---|---|---|"]
    yield lines
    print("\n".join(lines))


@pytest.mark.parametrize("name", FAULTS)
def test_every_rank_ends_with_the_story_and_the_run_goes_on(name, whole, table):
    fault = FAULTS[name]
    run_file = write_run_file(whole, name.replace(" ", "-"), fault.timeout_s)
    ranks = TwoRanks.start(run_file, fault.program)
    ends = [ranks.wait(0)]
    if fault.code is None:  # what torchrun does once a rank has failed
        ranks.processes[1].kill()
    ends.append(ranks.wait(1))
    assert ends[0].code == 2, ends
    at = [ends[0].said.find(words) for words in fault.says]
    assert -1 not in at, (fault.says, at, ends[0].said)
    assert at == sorted(at), ends[0].said
    assert fault.also in ends[1].said
    assert fault.code in (None, ends[1].code), ends
    struck = float(run_file.with_suffix(".struck").read_text())
    story = next(x for x in ends[0].said.splitlines() if x.startswith("longpack: "))
    table.append(f"| {name} | {story} | {max(end.at for end in ends) - struck:.1f} |")

    said = TwoRanks.start(run_file).finish()
    assert f'"resumed_from": {fault.saved}' in said
    check_resumed(whole, run_file.stem, said)


def test_a_rank_that_lags_less_than_the_timeout_is_waited_for(whole):
    run_file = write_run_file(whole, "lags", TIMEOUT_S)
    lag = "def lag(plain, *a, **k):\n    time.sleep(2)\n    return plain(*a, **k)\n"
    said = TwoRanks.start(run_file, f"{lag}at({CALL}, lag, {IN_FORWARD})").finish()
    check_resumed(whole, "lags", said)


def test_both_killed_at_any_moment(whole):
    killed = write_run_file(whole, "killed")
    metrics = whole / "killed" / "metrics.jsonl"
    ranks = TwoRanks.start(killed)
    deadline = time.monotonic() + 100
    while len(read_metrics(metrics)) < 10 and not ranks.ends:
        assert time.monotonic() < deadline, "no ten steps"
        time.sleep(0.005)
    ranks.kill()
    assert [ranks.ends[rank].code for rank in (0, 1)] == [-signal.SIGKILL] * 2
    assert 10 <= len(read_metrics(metrics)) < STEPS
    said = TwoRanks.start(killed).finish()
    assert '"resumed_from": 0' not in said
    check_resumed(whole, "killed", said)
