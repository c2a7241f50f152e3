"""How bytes move between the ranks of one axis: torch.distributed, or threads in one process."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longpack.errors import CollectiveError, rank_prefix

T = TypeVar("T")

# torch 2.13 renamed it and warns at the old name, which torch 2.10 has alone.
_all_gather_rows = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
    `group` identifies the axis: the process group, or the meeting point of the threads.
    """

    rank: int
    world_size: int

    @property
    def group(self) -> Any: ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stack `[n, ...]` of all ranks, in rank order: `[P * n, ...]`."""
        return self.start_all_gather(x).wait()

    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Send `send_counts[r]` consecutive rows to each rank r; return arrivals in rank order."""
        return self.start_all_to_all(x, send_counts, receive_counts).wait()

    def point_to_point(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Like `all_to_all`, but only ranks with rows for each other talk."""
        return self.start_point_to_point(x, send_counts, receive_counts).wait()

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        """Start an `all_gather`."""
        ...

    def start_all_to_all(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> Pending:
        """Start an `all_to_all`."""
        ...

    def start_point_to_point(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> Pending:
        """Start a `point_to_point`."""
        ...

    def all_gather_object(self, value: T) -> list[T]:
        """Return the picklable values of all ranks, in rank order."""
        ...


class ProcessGroupTransport(Transport):
    """Ranks of a torch.distributed process group (gloo or NCCL)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return self._group

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        out = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        source = x.contiguous()
        return self._start(
            "all_gather",
            source,
            out,
            lambda: [_all_gather_rows(out, source, group=self._group, async_op=True)],
        )

    def start_all_to_all(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> Pending:
        arrivals = x.new_empty((sum(receive_counts), *x.shape[1:])) if out is None else out
        source, sent, received = x.contiguous(), list(send_counts), list(receive_counts)
        return self._start(
            "all_to_all",
            source,
            arrivals,
            lambda: [
                dist.all_to_all_single(
                    arrivals, source, received, sent, group=self._group, async_op=True
                )
            ],
        )

    def start_point_to_point(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> Pending:
        arrivals = x.new_empty((sum(receive_counts), *x.shape[1:])) if out is None else out
        source = x.contiguous()
        return self._start(
            "point_to_point",
            source,
            arrivals,
            lambda: self._post(source, send_counts, arrivals, receive_counts),
        )

    def all_gather_object(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        with self._explained("all_gather_object", time.monotonic()):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def _post(
        self,
        source: torch.Tensor,
        send_counts: Sequence[int],
        out: torch.Tensor,
        receive_counts: Sequence[int],
    ) -> list[dist.Work]:
        operations = []
        for buffer, counts, post in (
            (source, send_counts, dist.isend),
            (out, receive_counts, dist.irecv),
        ):
            for peer, rows in enumerate(buffer.split(list(counts))):
                if rows.numel():
                    operations.append(dist.P2POp(post, rows, group=self._group, group_peer=peer))
        return dist.batch_isend_irecv(operations) if operations else []

    def _start(
        self,
        name: str,
        source: torch.Tensor,
        out: torch.Tensor,
        call: Callable[[], Sequence[dist.Work | None]],
    ) -> Pending:
        explained = partial(
            self._explained, f"{name} of {tuple(source.shape)} {source.dtype}", time.monotonic()
        )
        with explained():
            works = call()
        return _InFlight(works, source, out, explained)

    @contextmanager
    def _explained(self, what: str, began: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo and NCCL report a dead or late peer this way
            raise CollectiveError(
                f"{rank_prefix(self.rank, self.world_size)}{what} failed after "
                f"{time.monotonic() - began:.1f} s: {error}. A peer raised, died or never arrived; "
                "its own message says why"
            ) from error


@dataclass(frozen=True, eq=False)
class _InFlight:
    """Work of a process group, with the buffers that it reads and writes."""

    works: Sequence[dist.Work | None]
    source: torch.Tensor
    out: torch.Tensor
    explained: Callable[[], AbstractContextManager[None]]

    def wait(self) -> torch.Tensor:
        with self.explained():
            for work in self.works:
                if work is not None:
                    work.wait()
        return self.out


class Loopback:
    """A meeting point for ranks that are threads of one process.

    The same plans, exchanges and kernels run as over a process group, with all ranks in one
    interpreter: `run` calls a function once per rank, each on its own thread.

    Args:
        world_size: ranks.
        timeout_s: how long a rank waits for the others before every rank raises.
    """

    def __init__(self, world_size: int, timeout_s: float = 60.0) -> None:
        self.world_size = world_size
        self._slots: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=timeout_s)

    def transport(self, rank: int) -> "LoopbackTransport":
        """Return the end of one rank."""
        return LoopbackTransport(self, rank)

    def run(self, body: Callable[[Transport], T]) -> list[T]:
        """Call `body(transport)` for every rank at once; return the values in rank order.

        The first error of any rank is raised, after every rank has ended.
        """
        values: list[Any] = [None] * self.world_size
        errors: list[BaseException | None] = [None] * self.world_size

        def serve(rank: int) -> None:
            try:
                values[rank] = body(self.transport(rank))
            except BaseException as error:  # noqa: BLE001 -- handed to the caller below
                errors[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=serve, args=(r,)) for r in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raised = [e for e in errors if e is not None]
        if raised:  # a rank that only waited for a failed one says less than the failed one
            self._barrier.reset()
            raise next((e for e in raised if not isinstance(e, CollectiveError)), raised[0])
        return values

    def meet(self, rank: int, name: str, value: Any) -> list[Any]:
        """Leave a value, wait for every rank, and return all values in rank order."""
        met: list[Any] = []
        try:
            self._slots[rank] = (name, value)
            self._barrier.wait()
            met = list(self._slots)
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            if not met:  # else all were here, and one has failed since
                raise CollectiveError(
                    f"{rank_prefix(rank, self.world_size)}{name} failed: another rank raised or "
                    "did not arrive"
                ) from error
        if any(other != name for other, _ in met):
            calls = ", ".join(f"rank {r} {other}" for r, (other, _) in enumerate(met))
            raise CollectiveError(
                f"{rank_prefix(rank, self.world_size)}ranks met in different operations: {calls}"
            )
        return [value for _, value in met]


class LoopbackTransport(Transport):
    """One rank's end of a `Loopback`."""

    def __init__(self, meeting: Loopback, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.world_size = meeting.world_size

    @property
    def group(self) -> Loopback:
        """The meeting point."""
        return self._meeting

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        rows = self._meeting.meet(self.rank, "all_gather", x)
        self._check_alike("all_gather", rows)
        return _Arrived(torch.cat(rows))

    def start_all_to_all(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> Pending:
        return _Arrived(self._swap("all_to_all", x, send_counts, receive_counts, out))

    def start_point_to_point(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> Pending:
        return _Arrived(self._swap("point_to_point", x, send_counts, receive_counts, out))

    def all_gather_object(self, value: T) -> list[T]:
        return self._meeting.meet(self.rank, "all_gather_object", value)

    def _swap(
        self,
        name: str,
        x: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        parcels = self._meeting.meet(self.rank, name, x.split(list(send_counts)))
        mine = [parcel[self.rank] for parcel in parcels]
        if sum(len(rows) for rows in mine) != sum(receive_counts):
            raise CollectiveError(
                f"{rank_prefix(self.rank, self.world_size)}{name} brought "
                f"{sum(len(rows) for rows in mine)} rows where {sum(receive_counts)} were "
                "expected: ranks hold different plans"
            )
        self._check_alike(name, mine)
        return torch.cat(mine, out=out)

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


def as_transport(axis: "DeviceMesh | dist.ProcessGroup | Transport | None") -> Transport:
    """Return this rank's transport over an axis.

    Args:
        axis: a one-dimensional device mesh, a process group, a transport (returned as it is),
            or None for one rank alone, which needs no process group.

    Raises:
        CollectiveError: a mesh of more than one dimension, or one this rank is not part of.
    """
    if axis is None:
        return Loopback(1).transport(0)
    if isinstance(axis, Transport):
        return axis
    if isinstance(axis, DeviceMesh):
        if axis.ndim != 1:
            raise CollectiveError(
                f"the mesh has {axis.ndim} dimensions {axis.mesh_dim_names} of sizes "
                f"{tuple(axis.shape)}; pass the one that splits the row, as mesh['cp']"
            )
        group = axis.get_group()
        if dist.get_world_size(group) != axis.size():
            raise CollectiveError(
                f"the mesh has {axis.size()} ranks but its process group has "
                f"{dist.get_world_size(group)}: build the mesh with init_device_mesh and slice it "
                "by name"
            )
        return ProcessGroupTransport(group)
    if isinstance(axis, dist.ProcessGroup):
        return ProcessGroupTransport(axis)
    raise CollectiveError(
        f"expected a device mesh, a process group or None for the axis, got {type(axis).__name__}"
    )
