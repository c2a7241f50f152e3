"""One rank's lookout over a process group: says where it is, and asks where others are.

A collective that fails says which call and which socket. Who is waited for, and why, only that
rank can say. So each rank opens a door (`door.py`), doors are exchanged with the first vote of an
axis, and a rank whose operation fails, or runs into the group's timeout, asks at all of them. A
rank that ends with an error tells the others first.
"""

import atexit
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from longpack.collectives.door import ANSWER_S, Address, Door, ask
from longpack.collectives.whereabouts import Whereabouts, find_frames, shorten, tell_story
from longpack.errors import CollectiveError

ASKING_THREADS = 32

What = tuple[str, tuple[int, ...], torch.dtype | None]  # an operation, and the rows that it sends

# One for each group of this process; it goes with its group.
_LOOKOUTS: "WeakKeyDictionary[dist.ProcessGroup, Lookout]" = WeakKeyDictionary()


def lookout_of(group: dist.ProcessGroup) -> "Lookout":
    """Return this rank's lookout over a group, opened on the first call."""
    lookout = _LOOKOUTS.get(group)
    if lookout is None:
        lookout = _LOOKOUTS[group] = Lookout(
            dist.get_rank(group), dist.get_world_size(group), _axis(group)
        )
        finalize(group, lookout.close).atexit = False
    return lookout


def say_farewell(error: BaseException) -> None:
    """Tell the other ranks of every group that this one ends, and why."""
    for lookout in list(_LOOKOUTS.values()):
        lookout.say_farewell(error)


@atexit.register
def _explain_exit() -> None:
    error = getattr(sys, "last_value", None)  # that of an error which ended the program
    if error is not None:
        say_farewell(error)


class Lookout:
    """Where one rank is among the operations of one axis.

    Args:
        rank, world_size: of the group.
        axis: its name, for messages.
    """

    def __init__(self, rank: int, world_size: int, axis: str) -> None:
        self._rank, self._world_size, self._axis = rank, world_size, axis
        self._operation, self._what, self._place = 0, ("", (), None), ""
        self._waiting, self._since = False, time.monotonic()
        self._farewells: dict[int, str] = {}
        self._silent: set[int] = set()
        self._doors: list[Address | None] = [None] * world_size
        self._door = Door(self._answer) if world_size > 1 else None

    @property
    def address(self) -> Address | None:
        """Where the others can ask this rank."""
        return None if self._door is None else self._door.address

    def meet(self, doors: list[Address | None]) -> None:
        """Take in where every rank can be asked, in rank order."""
        self._doors = doors

    def close(self) -> None:
        """Answer no more."""
        if self._door is not None:
            self._door.close()

    def enter(self, place: str) -> None:
        """Say where in the model the next operations belong."""
        self._place = place

    def begin(self, *what: Any) -> None:
        """Note that this rank starts an operation."""
        self._operation += 1
        self._what, self._since = what, time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that this rank waits for what it has begun; explain a failure.

        Raises:
            CollectiveError: it failed: a rank is gone, stuck, or late by more than the group's
                timeout.
        """
        self._waiting, self._since = True, time.monotonic()
        try:
            yield
        except RuntimeError as error:  # gloo and NCCL report a dead or late peer this way
            raise self._explain(error) from error
        finally:
            self._waiting, self._since = False, time.monotonic()

    def say_farewell(self, error: BaseException) -> None:
        """Tell the others that this rank ends, and why.

        One by one, since a program that is ending can start no threads; as many as there is time
        for.
        """
        why = shorten(f"{type(error).__name__}: {error}")
        until = time.monotonic() + ANSWER_S
        for rank in range(self._world_size):
            if rank not in {self._rank, *self._silent} and time.monotonic() < until:
                self._ask(rank, {"farewell": [self._rank, why]})

    def _explain(self, error: RuntimeError) -> CollectiveError:
        here = self._whereabouts()  # before others are asked, which takes time
        with ThreadPoolExecutor(ASKING_THREADS) as asking:
            found = list(asking.map(self._find, range(self._world_size)))
        found[self._rank] = here
        return tell_story(self._rank, self._axis, found, str(error))

    def _find(self, rank: int) -> Whereabouts | str | None:
        """Return where a rank is, or why it cannot say; None if nobody told where to ask."""
        answer = self._ask(rank, {})
        if rank in self._farewells:
            return f"ended with {self._farewells[rank]}"
        return Whereabouts(**answer) if isinstance(answer, dict) else answer

    def _ask(self, rank: int, question: dict[str, Any]) -> Any:
        address = self._doors[rank]
        if address is None:
            return None
        try:
            return ask(address, question)
        except TimeoutError:
            self._silent.add(rank)
            return f"gives no answer in {ANSWER_S:g} s: its process is stopped, or out of reach"
        except (OSError, ValueError) as error:
            return f"has ended, its process is gone ({shorten(error)})"

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if "farewell" in question:
            rank, why = question["farewell"]
            self._farewells[rank] = why
        return asdict(self._whereabouts())

    def _whereabouts(self) -> Whereabouts:
        name, shape, dtype = self._what
        shown = f" of {shape} {str(dtype).removeprefix('torch.')}" if dtype else ""
        return Whereabouts(
            operation=self._operation,
            what=f"{name}{shown}",
            place=self._place,
            waiting=self._waiting,
            since_s=time.monotonic() - self._since,
            frames=find_frames(threading.main_thread().ident),
        )


def _axis(group: dist.ProcessGroup) -> str:
    """Name a group as its mesh does."""
    if group is dist.group.WORLD:
        return "world"
    name = group.group_desc.removeprefix("mesh_")
    return "cp" if name == "undefined" else name
