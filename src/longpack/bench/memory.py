"""How much memory a call takes: the peak of a process, and what autograd keeps."""

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from longpack.bench.contenders import CONTENDERS, Attend, Problem
from longpack.packing import PackedRow

_RESET_PEAK = Path("/proc/self/clear_refs")  # Linux: "5" lowers the recorded peak to the present


def tells_peaks() -> bool:
    """Say whether this system reports the peak memory of a process."""
    return _RESET_PEAK.exists()


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return how far a call lifts this process's resident memory at its peak, in bytes.

    What the process freed before may be used again unseen: measure first, in a fresh process.
    """
    _RESET_PEAK.write_text("5")
    before = _status_bytes("VmRSS")
    run()
    return _status_bytes("VmHWM") - before


def warm_up() -> None:
    """Bring thread pools and code pages in, so that they do not count."""
    small = PackedRow.from_lengths([64])
    for make in CONTENDERS.values():
        Problem.of(small.length).run(make(small))


def measure_peaks(jobs: Sequence[tuple[str, PackedRow]]) -> list[int]:
    """Return the peak bytes of one forward and backward, beyond its inputs, of each job.

    Args:
        jobs: a contender's name and the row; each runs in a process of its own.
    """
    if not jobs:
        return []
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as fresh:
        return fresh.starmap(_peak, jobs, 1)


def _peak(name: str, row: PackedRow) -> int:
    warm_up()
    problem, attend = Problem.of(row.length), CONTENDERS[name](row)
    return peak_bytes(lambda: problem.run(attend))


def kept_bytes(problem: Problem, attend: Attend) -> int:
    """Return the bytes that autograd keeps between forward and backward, inputs among them."""
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        out = problem.forward(attend)
    torch.autograd.grad(out, problem.leaves, problem.grad)  # every rank's backward is awaited
    return sum(kept.values())


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(field))
