"""K and V rows on their way: an exchange that starts early, in stages, and is waited for late."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longpack.collectives.transport import Pending, Transport


@dataclass(frozen=True, eq=False)
class Stage:
    """One rank's part of one stage, as index tensors on its device.

    Args:
        send_index: int64, local rows to send, grouped by destination.
        send_counts, receive_counts: rows per rank, host integers.
        reading: int64, the order in which arrivals are read, or None: as they arrive.
        first, stop: the arrivals' place among those of all stages.
    """

    send_index: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    reading: Tensor | None
    first: int
    stop: int


@dataclass(frozen=True, eq=False)
class StagedRoute:
    """One rank's part of an exchange of which it reads only what it does not hold itself.

    Args:
        kind: `allgather` (one stage), `halo`, `a2a`, or `none` where no rank receives a row.
        stages: in the order in which they travel; gradients go home by them in every kind.
        gathered: int64 `[received]`, where an all-gather puts the arrivals.
        wide: a rank may add up several gradients of a row before they go home; they then travel
            in the precision of the sum.
    """

    kind: str
    stages: tuple[Stage, ...]
    gathered: Tensor
    wide: bool

    @property
    def is_direct(self) -> bool:
        """Rows travel point to point."""
        return self.kind == "halo"

    @property
    def received(self) -> int:
        """Rows that arrive, in all stages."""
        return self.stages[-1].stop


@dataclass(frozen=True, eq=False)
class Arriving:
    """K and V rows of other ranks, `[received, num_kv_heads, head_dim + v_head_dim]`.

    K and V of one row lie side by side, as they travelled.
    """

    rows: Tensor
    route: StagedRoute
    _pending: list[Pending] = field(repr=False)

    @property
    def stages(self) -> int:
        """Stages that travel; none where no rank receives a row."""
        return len(self._pending)

    def wait(self, number: int) -> Tensor:
        """Return one stage's rows in reading order, a view of `rows`; once for each stage."""
        stage, arrived = self.route.stages[number], self._pending[number].wait()
        rows = self.rows[stage.first : stage.stop]
        if self.route.kind == "allgather":
            torch.index_select(arrived, 0, self.route.gathered, out=rows)
        elif stage.reading is not None:
            torch.index_select(arrived, 0, stage.reading, out=rows)
        return rows


def start_rows(key: Tensor, value: Tensor, transport: Transport, route: StagedRoute) -> Arriving:
    """Start to bring the rows of `key` and `value` that this rank lacks.

    Every rank calls it. Rows are picked from the two tensors as they are, into one message.

    Args:
        key, value: local rows `[n, num_kv_heads, dim]`, any strides.
        transport: the axis; every rank holds the same plan.
        route: this rank's part.
    """
    width = key.shape[-1] + value.shape[-1]
    rows = key.new_empty((route.received, key.shape[1], width))
    if route.kind == "none":
        return Arriving(rows, route, [])
    if route.kind == "allgather":
        return Arriving(rows, route, [transport.start_all_gather(torch.cat([key, value], dim=-1))])
    pending = []
    for stage in route.stages:
        picked = [x.index_select(0, stage.send_index) for x in (key, value)]
        out = rows[stage.first : stage.stop] if stage.reading is None else None
        counts = stage.send_counts, stage.receive_counts
        source = torch.cat(picked, dim=-1)
        pending.append(transport.start_all_to_all(source, *counts, out, route.is_direct))
    return Arriving(rows, route, pending)


def start_home(grad: Tensor, transport: Transport, route: StagedRoute, number: int) -> Pending:
    """Start to send the gradient of one stage's rows to their owners. Every rank calls it.

    Only rows that were read have a gradient, so an all-gather's go home like an all-to-all's.

    Args:
        grad: in reading order, as `Arriving.wait` returned the rows.
        transport: the axis.
        route: this rank's part.
        number: the stage.
    """
    stage = route.stages[number]
    if stage.reading is not None:
        grad = torch.empty_like(grad).index_copy_(0, stage.reading, grad)
    counts = stage.receive_counts, stage.send_counts
    return transport.start_all_to_all(grad, *counts, None, route.is_direct)


def add_home(total: Tensor, route: StagedRoute, arrived: list[Tensor]) -> None:
    """Add the gradients that came home, a tensor a stage, into `total` `[n, num_kv_heads, dims]`.

    Stages add in order, ranks in order within one, so the sum is the same in every run. It runs
    in the precision of `total`, which is contiguous.
    """
    flat = total.flatten(1)  # index_add_ is ten times faster on two dimensions than on three
    for stage, rows in zip(route.stages, arrived, strict=False):
        flat.index_add_(0, stage.send_index, rows.flatten(1).to(flat.dtype))
