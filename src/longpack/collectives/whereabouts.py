"""Where each rank of an axis is, and the story this makes when one waits in vain."""

import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from longpack.errors import CollectiveError, rank_prefix

FRAMES = 4  # of a program, innermost first
LINE = 300  # characters of an error that others are told

_SOURCE = re.compile(r"^\[\S+\.cc:\d+\] ")
_UNKNOWN = "could not be asked: ranks tell each other how in their first vote"
_PASSED_OVER = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class Whereabouts:
    """Where one rank is in the order of its axis's operations.

    Args:
        operation: how many it has started.
        what: the last of them, with shape and dtype.
        place: where in the model that belongs, "" where nobody said.
        waiting: it waits for its end.
        since_s: for how long it has waited, or done other things since.
        frames: what its program runs, innermost first, without torch's and this room's own.
    """

    operation: int
    what: str
    place: str
    waiting: bool
    since_s: float
    frames: str

    def __str__(self) -> str:
        last = f"{self.what}{f' ({self.place})' if self.place else ''}"
        if self.waiting:
            return f"has waited {self.since_s:.1f} s in operation {self.operation}, {last}"
        last = f"operation {self.operation}, {last}" if self.operation else "no operation"
        return f"has started {last}, and for {self.since_s:.1f} s has been in {self.frames}"


def tell_story(
    rank: int,
    axis: str,
    ranks: Sequence[Whereabouts | str | None],
    cause: str,
) -> CollectiveError:
    """Return the error of a rank that waited in vain: what for, for whom, where all are.

    Args:
        rank: the one that waited.
        axis: name of the ranks' axis.
        ranks: where each is, in rank order; text for one that cannot say, None for one that
            could not be asked.
        cause: what ended the wait.
    """
    mine = ranks[rank]
    assert isinstance(mine, Whereabouts)
    late = [r for r, theirs in enumerate(ranks) if r != rank and _is_late(theirs, mine)]
    whom = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}" if late else "no rank"
    if not late and None in ranks:
        whom = "a rank that cannot be asked"
    place = f" ({mine.place})" if mine.place else ""
    lines = [
        f"{rank_prefix(rank, len(ranks), axis)}{mine.what}{place} failed after {mine.since_s:.1f} "
        f"s, waiting for {whom}: {shorten(cause)}",
        *(f"  rank {r} {_UNKNOWN if theirs is None else theirs}" for r, theirs in enumerate(ranks)),
        "All ranks are there: they run different programs, or the link between them failed"
        if whom == "no rank"
        else "What the other ranks printed says more. Where a rank may rightly take longer, give "
        "the axis a longer timeout",
    ]
    return CollectiveError("\n".join(lines))


def _is_late(theirs: Whereabouts | str | None, mine: Whereabouts) -> bool:
    """Say whether a rank is gone, silent, or not yet where this one waits."""
    if isinstance(theirs, Whereabouts):
        return theirs.operation < mine.operation
    return theirs is not None


def shorten(cause: object) -> str:
    """Return the first words of an error, without the file that a backend's begin with."""
    text = " ".join(_SOURCE.sub("", str(cause)).split("This is typically")[0].split())
    return (text if len(text) <= LINE else f"{text[:LINE]}...").rstrip(". ")


def find_frames(thread: int | None) -> str:
    """Say what a thread of this process runs, innermost first."""
    frame = None if thread is None else sys._current_frames().get(thread)
    if frame is None:
        return "a thread that has ended"
    stack = [f for f in traceback.extract_stack(frame) if not f.filename.startswith(_PASSED_OVER)]
    shown = (f"{f.name} ({Path(f.filename).name}:{f.lineno})" for f in reversed(stack[-FRAMES:]))
    return " < ".join(shown) or "torch"
