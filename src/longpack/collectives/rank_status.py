"""Where each rank of an axis is, and the error this makes of a wait in vain."""

import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from longpack.errors import CollectiveError, rank_prefix

FRAMES = 4  # of a program, innermost first
LINE = 300  # characters of an error that others are told

_SOURCE = re.compile(r"^\[\S+\.cc:\d+\] ")
_PASSED_OVER = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class Operation:
    """One collective of an axis.

    Args:
        number: in the order in which this rank started them, from 1; 0 is none.
        name: of the operation, with the shape and dtype that it sends.
        place: where in the model it belongs, "" where nobody said.
    """

    number: int = 0
    name: str = ""
    place: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


@dataclass(frozen=True)
class RankStatus:
    """Where one rank is in the order of its axis's operations.

    Args:
        started: the last operation that it has started.
        awaited: the operation for whose end it waits, if any.
        since_s: for how long it has waited, or done other things since.
        frames: what its program runs, innermost first, without torch's and this room's own.
    """

    started: Operation
    awaited: Operation | None
    since_s: float
    frames: str

    def __str__(self) -> str:
        if self.awaited is not None:
            number = self.awaited.number
            return f"has waited {self.since_s:.1f} s in operation {number}, {self.awaited}"
        number = self.started.number
        last = f"operation {number}, {self.started}" if number else "no operation"
        return f"has started {last}, and for {self.since_s:.1f} s has been in {self.frames}"


@dataclass(frozen=True)
class NoStatus:
    """Why a rank does not say where it is.

    Args:
        why: in words that follow its number.
        is_late: it is gone or stopped, and others wait for it; else nobody knows.
    """

    why: str
    is_late: bool

    def __str__(self) -> str:
        return self.why


def explain_failure(
    rank: int,
    axis: str,
    ranks: Sequence[RankStatus | NoStatus],
    cause: str,
) -> CollectiveError:
    """Return the error of a rank that waited in vain: what for, for whom, where all are.

    Args:
        rank: the one that waited.
        axis: name of the ranks' axis.
        ranks: where each is, in rank order.
        cause: what ended the wait.
    """
    mine = ranks[rank]
    assert isinstance(mine, RankStatus)
    operation = mine.awaited or mine.started
    late = [r for r, theirs in enumerate(ranks) if r != rank and _is_late(theirs, operation)]
    unknown = any(isinstance(theirs, NoStatus) and not theirs.is_late for theirs in ranks)
    whom = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}" if late else "no rank"
    if not late and unknown:
        whom = "a rank that cannot be asked"
    remedy = (
        "All ranks are there: they run different programs, or the link between them failed"
        if not late and not unknown
        else "What the other ranks printed says more. Where a rank may rightly take longer, give "
        "the axis a longer timeout"
    )
    lines = [
        f"{rank_prefix(rank, len(ranks), axis)}{operation} failed after {mine.since_s:.1f} s, "
        f"waiting for {whom}: {shorten(cause)}",
        *(f"  rank {r} {theirs}" for r, theirs in enumerate(ranks)),
        remedy,
    ]
    return CollectiveError("\n".join(lines))


def _is_late(theirs: RankStatus | NoStatus, operation: Operation) -> bool:
    if isinstance(theirs, NoStatus):
        return theirs.is_late
    return theirs.started.number < operation.number


def shorten(cause: object) -> str:
    """Return the first words of an error, without the file that a backend's begin with."""
    text = " ".join(_SOURCE.sub("", str(cause)).split("This is typically")[0].split())
    return (text if len(text) <= LINE else f"{text[:LINE]}...").rstrip(". ")


def find_frames(thread: int | None) -> str:
    """Say what a thread of this process runs, innermost first, without reading a file."""
    frame = None if thread is None else sys._current_frames().get(thread)
    if frame is None:
        return "a thread that has ended"
    own = (
        (f.f_code.co_name, f.f_code.co_filename, line)
        for f, line in traceback.walk_stack(frame)
        if not f.f_code.co_filename.startswith(_PASSED_OVER)
    )
    shown = (f"{name} ({Path(file).name}:{line})" for name, file, line in islice(own, FRAMES))
    return " < ".join(shown) or "torch"
