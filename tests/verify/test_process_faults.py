"""Ranks that are processes: one stops, dawdles or raises, and the other ends with its story."""

import datetime
import os
import signal
import time

import pytest
import torch.distributed as dist
from tests.verify.patients import Block, Patient
from tests.verify.test_faults import found

from longpack.verify import verify_model

TIMEOUT_S = 2


class Strike:
    """Happens once, on rank 1, whichever copy of the model comes to it first."""

    def __init__(self, happen, woken):
        self.happen, self.woken, self.left = happen, woken, 1

    def __deepcopy__(self, memo):
        return self

    def __call__(self, rank):
        if rank == 1 and self.left:
            self.left = 0
            self.happen(self.woken)


class Struck(Block):
    def __init__(self, strike, after):
        super().__init__()
        self.strike, self.after = strike, after

    def forward(self, x, step=None):
        if self.after:
            x = super().forward(x, step)
        self.strike(step.rank)
        return x if self.after else super().forward(x, step)


def stop(woken):
    os.kill(os.getpid(), signal.SIGSTOP)


def dawdle(woken):
    while not woken.exists():
        time.sleep(0.01)


def fail(woken):
    raise ArithmeticError("planted")


def check_struck(rank, world_size, happen, woken, after=False):
    """Return what a rank's doctor finds; rank 0 then wakes rank 1."""
    processes = [None] * world_size
    dist.all_gather_object(processes, os.getpid())
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    group = dist.new_group([0, 1], timeout=timeout, group_desc="mesh_cp")
    model = Patient()
    model.blocks[1] = Struck(Strike(happen, woken), after)
    report = verify_model(model, cp_mesh=group)
    if rank == 0:
        woken.touch()
        os.kill(processes[1], signal.SIGCONT)
    return report


@pytest.mark.parametrize(
    ("happen", "story", "own"),
    [
        (stop, "rank 1 gives no answer in 2 s: its process is stopped", "hang"),
        (dawdle, r"rank 1 has started operation .* dawdle \(test_process_faults.py:", "hang"),
        (fail, r"rank 1 has .*\(after ArithmeticError: planted\)", "raised"),
    ],
    ids=["stops", "dawdles", "raises"],
)
def test_the_other_rank_ends_with_the_story(on_ranks, tmp_path, happen, story, own):
    ours, theirs = on_ranks(check_struck, happen, tmp_path / "woken", world_size=2)
    assert found(ours, "hang", r"^blocks\.1\.attention of rank 0$", story) == ["hang"]
    assert found(theirs, own, r"^blocks\.1(\.attention)? of rank 1$") == [own]
    for report in (ours, theirs):
        assert [r.name for r in report.results if r.ran] == ["agreement", "inputs"]


def test_an_error_on_one_rank_that_no_other_waits_for_is_the_same_finding_on_all(
    on_ranks, tmp_path
):
    reports = on_ranks(check_struck, fail, tmp_path / "woken", True, world_size=2)
    for report in reports:
        said = "ArithmeticError: planted"
        assert found(report, "raised", r"^blocks\.1 of rank 1$", said) == ["raised"]
        assert [r.name for r in report.results if not r.ran] == ["coverage"]
