"""Ranks that are threads of one process."""

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from longpack.collectives.rank_status import (
    NoStatus,
    Operation,
    RankStatus,
    explain_failure,
    find_frames,
)
from longpack.collectives.transport import Pending, Transport
from longpack.errors import CollectiveError, rank_prefix

T = TypeVar("T")


@dataclass
class _RankState:
    """One rank at the meeting point: what it brought last, and where it is."""

    operation: Operation = field(default_factory=Operation)
    value: Any = None
    place: str = ""
    since: float = field(default_factory=time.monotonic)
    thread: int | None = None
    ended: str = ""

    def status(self, is_waiting: bool) -> RankStatus | NoStatus:
        if self.ended:
            return NoStatus(self.ended, is_late=True)
        awaited = self.operation if is_waiting else None
        since_s = time.monotonic() - self.since
        return RankStatus(self.operation, awaited, since_s, find_frames(self.thread))


class Loopback:
    """A meeting point for ranks that are threads of one process.

    The same plans, exchanges and kernels run as over a process group, with all ranks in one
    interpreter: `run` calls a function once per rank, each on its own thread.

    Args:
        world_size: ranks.
        timeout_s: how long a rank waits for the others before every rank raises.
    """

    def __init__(self, world_size: int, timeout_s: float = 60.0) -> None:
        self.world_size, self._timeout_s = world_size, timeout_s
        self._changed = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        self._ranks = [_RankState() for _ in range(self.world_size)]
        self._met: list[tuple[str, Any]] = []
        self._rounds, self._here, self._broken = 0, 0, ""

    def transport(self, rank: int) -> "LoopbackTransport":
        """Return the end of one rank."""
        return LoopbackTransport(self, rank)

    def run(self, body: Callable[[Transport], T]) -> list[T]:
        """Call `body(transport)` for every rank at once; return the values in rank order.

        The first error of any rank is raised, after every rank has ended. A rank that ends while
        others wait for it ends their wait.
        """
        values: list[Any] = [None] * self.world_size
        errors: list[BaseException | None] = [None] * self.world_size

        def serve(rank: int) -> None:
            self._ranks[rank].thread = threading.get_ident()
            why = "has ended: it makes fewer calls than others"
            try:
                values[rank] = body(self.transport(rank))
            except BaseException as error:  # noqa: BLE001 -- handed to the caller below
                errors[rank] = error
                why = f"ended with {type(error).__name__}: {error}"
            self._leave(rank, why)

        threads = [threading.Thread(target=serve, args=(r,)) for r in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._reset()
        raised = [e for e in errors if e is not None]
        if raised:  # a rank that only waited for a failed one says less than the failed one
            raise next((e for e in raised if not isinstance(e, CollectiveError)), raised[0])
        return values

    def enter(self, rank: int, place: str) -> None:
        """Say where in the model a rank's next operations belong."""
        self._ranks[rank].place = place

    def meet(self, rank: int, name: str, value: Any) -> list[Any]:
        """Leave a value, wait for every rank, and return all values in rank order.

        A value must not change once it is left.

        Raises:
            CollectiveError: on every rank, where one has ended, comes too late, or calls another
                operation.
        """
        with self._changed:
            state = self._ranks[rank]
            state.operation = Operation(state.operation.number + 1, name, state.place)
            state.value, state.since = value, time.monotonic()
            state.thread = threading.get_ident()
            self._here += 1
            if self._here == self.world_size and not self._broken:
                self._met = [(state.operation.name, state.value) for state in self._ranks]
                self._rounds, self._here = self._rounds + 1, 0
                self._changed.notify_all()
            else:
                self._await_others(rank, self._rounds)
            met, state.since = self._met, time.monotonic()
        if any(other != name for other, _ in met):
            calls = ", ".join(f"rank {r} {other}" for r, (other, _) in enumerate(met))
            raise CollectiveError(
                f"{rank_prefix(rank, self.world_size)}ranks met in different operations: {calls}"
            )
        return [value for _, value in met]

    def _await_others(self, rank: int, round_: int) -> None:
        """Wait for the end of a round, of which no rank comes to the next before all have left."""

        def is_over() -> bool:
            return self._rounds > round_ or bool(self._broken or self._absent())

        self._changed.wait_for(is_over, self._timeout_s)
        if self._rounds > round_:
            return
        late = [r for r, s in enumerate(self._ranks) if s.ended or s.operation.number <= round_]
        cause = "it ended" if self._absent() else f"not all came within {self._timeout_s:g} s"
        self._broken = self._broken or cause
        self._changed.notify_all()
        statuses = [s.status(is_waiting=r not in late) for r, s in enumerate(self._ranks)]
        raise explain_failure(rank, "cp", statuses, self._broken)

    def _absent(self) -> list[int]:
        return [rank for rank, state in enumerate(self._ranks) if state.ended]

    def _leave(self, rank: int, why: str) -> None:
        with self._changed:
            self._ranks[rank].ended = why
            self._changed.notify_all()


class LoopbackTransport(Transport):
    """One rank's end of a `Loopback`.

    What is sent is copied first: others read it when the sender may already change its rows.
    """

    def __init__(self, meeting: Loopback, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.world_size = meeting.world_size

    @property
    def group(self) -> Loopback:
        """The meeting point."""
        return self._meeting

    def enter(self, place: str) -> None:
        self._meeting.enter(self.rank, place)

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        rows = self._meeting.meet(self.rank, "all_gather", x.detach().clone())
        self._check_alike("all_gather", rows)
        return _Arrived(torch.cat(rows))

    def start_all_to_all(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: torch.Tensor | None = None,
        direct: bool = False,
    ) -> Pending:
        name = "point_to_point" if direct else "all_to_all"
        parcels = self._meeting.meet(self.rank, name, x.detach().clone().split(list(send_counts)))
        mine = [parcel[self.rank] for parcel in parcels]
        if sum(len(rows) for rows in mine) != sum(receive_counts):
            raise CollectiveError(
                f"{rank_prefix(self.rank, self.world_size)}{name} brought "
                f"{sum(len(rows) for rows in mine)} rows where {sum(receive_counts)} were "
                "expected: ranks hold different plans"
            )
        self._check_alike(name, mine)
        return _Arrived(torch.cat(mine, out=out))

    def start_all_reduce(self, x: torch.Tensor) -> Pending:
        parts = self._meeting.meet(self.rank, "all_reduce", x.detach().clone())
        self._check_alike("all_reduce", parts)
        x.copy_(torch.stack(parts).sum(0))
        return _Arrived(x)

    def all_gather_object(self, value: T) -> list[T]:
        met = self._meeting.meet(self.rank, "all_gather_object", pickle.dumps(value))
        return [pickle.loads(value) for value in met]  # each rank its own, as over a group

    def _check_alike(self, name: str, parcels: Sequence[torch.Tensor]) -> None:
        kinds = {(tuple(rows.shape[1:]), rows.dtype) for rows in parcels}
        if len(kinds) > 1:
            raise CollectiveError(
                f"{rank_prefix(self.rank, self.world_size)}{name} met rows of different shapes or "
                f"dtypes: {', '.join(map(str, sorted(kinds, key=str)))}; ranks must pass the same"
            )


@dataclass(frozen=True, eq=False)
class _Arrived:
    """An exchange that was over when it started: threads meet where they start one."""

    rows: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.rows
