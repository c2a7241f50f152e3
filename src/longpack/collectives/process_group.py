"""Ranks of a torch.distributed process group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from longpack.collectives.monitor import Monitor, monitor_of
from longpack.collectives.rank_status import Operation
from longpack.collectives.transport import Pending, Transport

T = TypeVar("T")

# torch 2.13 renamed it and warns at the old name, which torch 2.10 has alone.
_all_gather_rows = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroupTransport(Transport):
    """Ranks of a torch.distributed process group (gloo or NCCL).

    Operations end within the group's timeout. Over gloo a rank then raises, with where the others
    are; over NCCL the host does not wait for a device, and NCCL's own watchdog ends the process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._monitor = group, monitor_of(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.moves_host_tensors = any(d.type == "cpu" for d in group._device_types)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return self._group

    def enter(self, place: str) -> None:
        self._monitor.enter(place)

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
        direct: bool = False,
    ) -> Pending:
        arrivals = x.new_empty((sum(receive_counts), *x.shape[1:])) if out is None else out
        source, sent, received = x.contiguous(), list(send_counts), list(receive_counts)
        if direct:
            self._meet_all(x.device)
            post = partial(self._post, source, sent, arrivals, received)
            return self._start("point_to_point", source, arrivals, post)
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

    def start_all_reduce(self, x: torch.Tensor) -> Pending:
        return self._start(
            "all_reduce", x, x, lambda: [dist.all_reduce(x, group=self._group, async_op=True)]
        )

    def all_gather_object(self, value: T) -> list[T]:
        met: list[Any] = [None] * self.world_size
        with self._monitor.waiting(self._monitor.start("all_gather_object")):
            dist.all_gather_object(met, (value, self._monitor.address), group=self._group)
        self._monitor.set_peers([address for _, address in met])
        return [value for value, _ in met]

    def _meet_all(self, device: torch.device) -> None:
        """Have all ranks take part in a group's first operation on a device, as NCCL asks.

        Ranks without rows for each other take no part in a direct exchange, and votes may travel
        over the host's backend.
        """
        if device.type != "cpu" and not self._monitor.has_met(device):
            self.start_all_gather(torch.zeros(1, device=device)).wait()

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
        dtype = str(source.dtype).removeprefix("torch.")
        operation = self._monitor.start(f"{name} of {tuple(source.shape)} {dtype}")
        with self._monitor.waiting(operation):
            works = call()
        return _InFlight(works, source, out, self._monitor, operation)


@dataclass(frozen=True, eq=False)
class _InFlight:
    """Work of a process group, with the buffers that it reads and writes."""

    works: Sequence[dist.Work | None]
    source: torch.Tensor
    out: torch.Tensor
    monitor: Monitor
    operation: Operation

    def wait(self) -> torch.Tensor:
        with self.monitor.waiting(self.operation):
            for work in self.works:
                if work is not None:
                    work.wait()
        return self.out
