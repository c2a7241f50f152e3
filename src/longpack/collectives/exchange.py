"""Differentiable exchanges of rows. The backward of each is its transpose, and adds."""

from dataclasses import dataclass
from typing import Any

import torch

from longpack.collectives.transport import Transport


@dataclass(frozen=True, eq=False)
class Route:
    """One rank's part of an exchange, as index tensors on its device.

    Rows land as `landed`: for `allgather` every rank's rows in rank order; otherwise the own
    rows, then arrivals in rank order. The result is `landed[key_index]`.

    Args:
        kind: `allgather`, `halo`, `a2a`, or `none` where no rank receives a row.
        send_index: int64, local rows to send, grouped by destination.
        send_counts, receive_counts: rows per rank, host integers.
        key_index: int64 `[K]` into `landed`, or None where the result is its first `num_keys`
            rows.
        num_keys: rows of the result.
    """

    kind: str
    send_index: torch.Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    key_index: torch.Tensor | None
    num_keys: int


def exchange_rows(
    x: torch.Tensor, transport: Transport, route: Route, place: str = ""
) -> torch.Tensor:
    """Bring together the rows that this rank reads.

    Forward: `result = landed[key_index]`. Backward, its transpose: the gradient of every copy
    of a row goes home and is added there, in fp32 for lower precisions, and rounded once.
    Every rank calls it, also one with nothing to send, to receive or to read.

    Args:
        x: local rows `[n, ...]`.
        transport: the axis; every rank holds the same plan.
        route: this rank's part.
        place: where in the model this is, for messages.

    Returns:
        `[route.num_keys, ...]`.
    """
    return _Exchange.apply(x, transport, route, place)  # pyright: ignore[reportReturnType]


def gather_rows(x: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Stack `[n, ...]` of all ranks: `[P * n, ...]`. Backward: sum of the ranks' gradients."""
    return _Gather.apply(x, transport)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, transport: Transport, route: Route, place: str
    ) -> torch.Tensor:
        ctx.transport, ctx.route, ctx.shape, ctx.place = transport, route, x.shape, place
        transport.enter(f"{place}, forward")
        if route.kind == "none":
            landed = x
        elif route.kind == "allgather":
            landed = transport.all_gather(x)
        else:
            sent = x.index_select(0, route.send_index)
            counts = route.send_counts, route.receive_counts
            arrived = transport.all_to_all(sent, *counts, direct=route.kind == "halo")
            landed = torch.cat([x, arrived])
        if route.key_index is None:
            return landed[: route.num_keys]
        return landed.index_select(0, route.key_index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        transport, route, shape = ctx.transport, ctx.route, ctx.shape
        transport.enter(f"{ctx.place}, backward")
        landed_rows = shape[0]
        if route.kind == "allgather":
            landed_rows *= transport.world_size
        elif route.kind != "none":
            landed_rows += sum(route.receive_counts)
        landed = _place(grad, route, landed_rows)
        if route.kind == "none":
            return landed, None, None, None
        if route.kind == "allgather":
            return _sum_home(landed, transport), None, None, None
        home, away = landed[: shape[0]], landed[shape[0] :]
        counts = route.receive_counts, route.send_counts
        back = transport.all_to_all(away, *counts, direct=route.kind == "halo")
        total = home.to(_sum_dtype(grad.dtype), copy=True)
        total.index_add_(0, route.send_index, back.to(total.dtype))
        return total.to(grad.dtype), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transport: Transport) -> torch.Tensor:
        ctx.transport = transport
        return transport.all_gather(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        return _sum_home(grad, ctx.transport), None


def _place(grad: torch.Tensor, route: Route, rows: int) -> torch.Tensor:
    """Return the gradient of `landed`: rows that nobody read have none."""
    landed = grad.new_zeros((rows, *grad.shape[1:]))
    if route.key_index is None:
        landed[: route.num_keys] = grad
    else:
        landed.index_copy_(0, route.key_index, grad)  # a rank reads no row twice
    return landed


def _sum_home(landed: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Reduce-scatter `[P * n, ...]` to `[n, ...]`: each rank gets the sum of its rows.

    Done as an all-to-all and a local sum: the same bytes as a reduce-scatter, but the sum runs
    in fp32 for lower precisions and in rank order, so it is rounded once and deterministic.
    """
    world = transport.world_size
    rows = landed.shape[0] // world
    counts = (rows,) * world
    parts = transport.all_to_all(landed, counts, counts)
    parts = parts.view(world, rows, *landed.shape[1:])
    return parts.sum(dim=0, dtype=_sum_dtype(landed.dtype)).to(landed.dtype)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype
