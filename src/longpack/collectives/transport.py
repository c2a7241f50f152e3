"""What moves rows between the ranks of one axis."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

T = TypeVar("T")


class Pending(Protocol):
    """An exchange that has started."""

    def wait(self) -> torch.Tensor:
        """Return what arrived, once it is here; the rows that were sent may change from then on."""
        ...


@runtime_checkable
class Transport(Protocol):
    """One rank's end of an axis. Every rank calls the same operations in the same order.

    What `start_x` returns, waited for, is what `x` returns; `out` takes the arrivals where given.
    A class that inherits this has each `x` from its `start_x`.
    An operation that fails, or does not end within the axis's timeout, raises `CollectiveError` on
    every rank that waits for it, with who waits for whom.

    `group` identifies the axis: the process group, or the meeting point of the threads.
    `moves_host_tensors` says that tensors on the host move without a device having to wait.
    """

    rank: int
    world_size: int
    moves_host_tensors: bool = True

    @property
    def group(self) -> Any: ...

    def enter(self, place: str) -> None:
        """Say where in the model the operations that follow belong, for messages."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stack `[n, ...]` of all ranks, in rank order: `[P * n, ...]`."""
        return self.start_all_gather(x).wait()

    def all_to_all(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        direct: bool = False,
    ) -> torch.Tensor:
        """Send `send_counts[r]` consecutive rows to each rank r; return arrivals in rank order.

        `direct`: point to point, so that only ranks with rows for each other talk.
        """
        return self.start_all_to_all(x, send_counts, receive_counts, None, direct).wait()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add up `x` of all ranks, in place; return it."""
        return self.start_all_reduce(x).wait()

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        """Start an `all_gather`."""
        ...

    def start_all_to_all(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: torch.Tensor | None = None,
        direct: bool = False,
    ) -> Pending:
        """Start an `all_to_all`."""
        ...

    def start_all_reduce(self, x: torch.Tensor) -> Pending:
        """Start an `all_reduce`."""
        ...

    def all_gather_object(self, value: T) -> list[T]:
        """Return the picklable values of all ranks, in rank order."""
        ...
