"""One rank's monitor of a process group: says where it is, and asks where others are.

A collective that fails says which call and which socket. Who is waited for, and why, only that
rank can say. So each rank runs a status server, addresses are exchanged with the first vote of an
axis, and a rank whose operation fails, or runs into the group's timeout, asks all the others. A
rank that ends with an error tells the others first.
"""

import atexit
import ipaddress
import re
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

from longpack.collectives.rank_status import (
    NoStatus,
    Operation,
    RankStatus,
    explain_failure,
    find_frames,
    shorten,
)
from longpack.collectives.status_server import ANSWER_S, Address, StatusServer, ask
from longpack.errors import CollectiveError

ASKING_THREADS = 256

# One for each group of this process; it goes with its group.
_MONITORS: "WeakKeyDictionary[dist.ProcessGroup, Monitor]" = WeakKeyDictionary()

# gloo raises plain RuntimeErrors, of which these words are about a peer or the link to it.
_PEER_FAILED = re.compile(r"gloo|[Cc]onnection|[Tt]imed? ?out|[Ss]ocket|pair closure|[Pp]eer|NCCL")


def monitor_of(group: dist.ProcessGroup) -> "Monitor":
    """Return this rank's monitor of a group, opened on the first call."""
    monitor = _MONITORS.get(group)
    if monitor is None:
        monitor = _MONITORS[group] = Monitor(
            dist.get_rank(group), dist.get_world_size(group), _axis(group)
        )
        finalize(group, monitor.close).atexit = False
    return monitor


def report_exit(error: BaseException) -> None:
    """Tell the other ranks of every group that this one ends, and why."""
    for monitor in list(_MONITORS.values()):
        monitor.report_exit(error)


@atexit.register
def _report_uncaught() -> None:
    error = getattr(sys, "last_value", None)  # that of an error which ended the program
    if error is not None:
        report_exit(error)


class Monitor:
    """Where one rank is among the operations of one axis.

    Args:
        rank, world_size: of the group.
        axis: its name, for messages.
    """

    def __init__(self, rank: int, world_size: int, axis: str) -> None:
        self._rank, self._world_size, self._axis = rank, world_size, axis
        self._place, self._started = "", Operation()
        self._awaited: Operation | None = None
        self._since = time.monotonic()
        self._exits: dict[int, str] = {}
        self._silent: set[int] = set()
        self._devices: set[torch.device] = set()
        self._peers: list[Address | None] = [None] * world_size
        self._server = _open_server(self._answer) if world_size > 1 else None

    @property
    def address(self) -> Address | None:
        """Where the others can ask this rank; None where nobody can."""
        return None if self._server is None else self._server.address

    def set_peers(self, addresses: list[Address | None]) -> None:
        """Take in where every rank can be asked, in rank order."""
        self._peers = addresses

    def has_met(self, device: torch.device) -> bool:
        """Say whether this is asked for the second time about a device."""
        known = device in self._devices
        self._devices.add(device)
        return known

    def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()

    def enter(self, place: str) -> None:
        """Say where in the model the next operations belong."""
        self._place = place

    def start(self, name: str) -> Operation:
        """Note that this rank starts an operation."""
        self._started = Operation(self._started.number + 1, name, self._place)
        self._since = time.monotonic()
        return self._started

    @contextmanager
    def waiting(self, operation: Operation) -> Iterator[None]:
        """Note that this rank waits for an operation; explain a failure of its peers.

        Raises:
            CollectiveError: a rank is gone, stuck, or late by more than the group's timeout.
        """
        self._awaited, self._since = operation, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or _PEER_FAILED.search(str(error)):
                raise self._explain(error) from error
            raise  # this rank's own: out of memory, a dtype that the backend lacks
        finally:
            self._awaited, self._since = None, time.monotonic()

    def report_exit(self, error: BaseException) -> None:
        """Tell the others that this rank ends, and why.

        One by one, since a program that is ending can start no threads; as many as there is time
        for.
        """
        why = shorten(f"{type(error).__name__}: {error}")
        until = time.monotonic() + ANSWER_S
        for rank in range(self._world_size):
            if rank not in {self._rank, *self._silent} and time.monotonic() < until:
                self._ask(rank, {"exit": [self._rank, why]})

    def _explain(self, error: RuntimeError) -> CollectiveError:
        here = self._status()  # before others are asked, which takes time
        with ThreadPoolExecutor(min(self._world_size, ASKING_THREADS)) as asking:
            found = list(asking.map(self._find, range(self._world_size)))
        found[self._rank] = here
        return explain_failure(self._rank, self._axis, found, str(error))

    def _find(self, rank: int) -> RankStatus | NoStatus:
        answer = self._ask(rank, {})
        if rank in self._exits:
            return NoStatus(f"ended with {self._exits[rank]}", is_late=True)
        if isinstance(answer, NoStatus):
            return answer
        try:
            awaited = answer.pop("awaited")
            started = Operation(**answer.pop("started"))
            return RankStatus(started, awaited and Operation(**awaited), **answer)
        except (AttributeError, KeyError, TypeError):
            return NoStatus("answers in other words: it runs another longpack", is_late=False)

    def _ask(self, rank: int, question: dict[str, Any]) -> Any:
        address, mine = self._peers[rank], self.address
        if address is None:
            return NoStatus("could not be asked: no vote has told where", is_late=False)
        elsewhere = mine is not None and address.machine != mine.machine
        if elsewhere and ipaddress.ip_address(address.host).is_loopback:
            return NoStatus("could not be asked: set MASTER_ADDR on its machine", is_late=False)
        try:
            return ask(address, question)
        except TimeoutError:
            self._silent.add(rank)
            why = f"gives no answer in {ANSWER_S:g} s: its process is stopped, or out of reach"
            return NoStatus(why, is_late=True)
        except (ConnectionRefusedError, ConnectionResetError) as error:
            return NoStatus(f"has ended, its process is gone ({shorten(error)})", is_late=True)
        except (OSError, ValueError) as error:
            return NoStatus(f"could not be asked ({shorten(error)})", is_late=False)

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if "exit" in question:
            rank, why = question["exit"]
            self._exits[rank] = why
        return asdict(self._status())

    def _status(self) -> RankStatus:
        frames = find_frames(threading.main_thread().ident)
        return RankStatus(self._started, self._awaited, time.monotonic() - self._since, frames)


def _open_server(answer: Any) -> StatusServer | None:
    try:
        return StatusServer(answer)
    except OSError:  # nobody may listen here: the others are told that it cannot be asked
        return None


def _axis(group: dist.ProcessGroup) -> str:
    """Name a group as its mesh does."""
    if group is dist.group.WORLD:
        return "world"
    name = group.group_desc.removeprefix("mesh_")
    return "cp" if name == "undefined" else name
