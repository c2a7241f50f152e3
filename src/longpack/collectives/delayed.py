"""A slow link, on purpose: shows how much of an exchange is hidden, without a slow network."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from longpack.collectives.transport import Pending, Transport

T = TypeVar("T")


class Delayed(Transport):
    """A transport whose arrivals are there no sooner than `delay_s` after they set out.

    `exposed_s` adds up the seconds for which this rank waited for arrivals.

    Args:
        transport: what moves the rows.
        delay_s: least time from the start of an exchange to its end.
        clock, sleep: time, in seconds; tests put a clock of their own here.
    """

    def __init__(
        self,
        transport: Transport,
        delay_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport = transport
        self._delay_s, self._clock, self._sleep = delay_s, clock, sleep
        self.rank, self.world_size = transport.rank, transport.world_size
        self.moves_host_tensors = transport.moves_host_tensors
        self.exposed_s = 0.0

    @property
    def group(self) -> Any:
        """The group of the transport within."""
        return self._transport.group

    def enter(self, place: str) -> None:
        self._transport.enter(place)

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        return self._late(self._transport.start_all_gather(x))

    def start_all_to_all(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: torch.Tensor | None = None,
        direct: bool = False,
    ) -> Pending:
        start = self._transport.start_all_to_all
        return self._late(start(x, send_counts, receive_counts, out, direct))

    def start_all_reduce(self, x: torch.Tensor) -> Pending:
        return self._late(self._transport.start_all_reduce(x))

    def all_gather_object(self, value: T) -> list[T]:
        return self._transport.all_gather_object(value)

    def _late(self, pending: Pending) -> Pending:
        return _Late(self, pending, self._clock() + self._delay_s)

    def _wait(self, pending: Pending, due: float) -> torch.Tensor:
        began = self._clock()
        if began < due:
            self._sleep(due - began)
        arrived = pending.wait()
        self.exposed_s += self._clock() - began
        return arrived


@dataclass(frozen=True, eq=False)
class _Late:
    link: Delayed
    pending: Pending
    due: float

    def wait(self) -> torch.Tensor:
        return self.link._wait(self.pending, self.due)
