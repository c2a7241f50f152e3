"""One rank's attention with its K/V exchange hidden behind it.

Forward: K and V rows leave, the rank's own rows attend each other, and what arrives is attended
stage by stage and merged by log-sum-exp. Backward: gradients of arrivals first; they go home
while the rank's own part runs, and are added there. The order of every sum is fixed, so results
are the same bit for bit whether the exchange is hidden or waited for (on CUDA, where kernels add
in any order, under `torch.use_deterministic_algorithms(True)`).

On CUDA all of it is launched at once. Over NCCL rows travel on a stream of its own from when what
is sent is ready; `wait` holds back the current stream, not the host; and every buffer that travels
is held until it is waited for, so the allocator gives it to nobody before.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from longpack.collectives import (
    Arriving,
    Stage,
    StagedRoute,
    Transport,
    add_home,
    start_home,
    start_rows,
)
from longpack.kernels import Segments, TiledKernel, Tiles, full_tiles
from longpack.plan import Plan
from longpack.plan.parts import Parts, cut_parts


@dataclass(frozen=True, eq=False)
class StagedAttention:
    """What one rank's attention calls of one step share: tiles and a route.

    Args:
        local: who attends what among the rank's own rows.
        remote: for each stage, the tiles over its arrivals.
        route: this rank's part of the exchange.
        transport: this rank's end of the axis.
        overlap: attend own rows while others travel; if not, wait first.
        name: of the step, for messages.
    """

    local: Segments
    remote: tuple[Tiles, ...]
    route: StagedRoute
    transport: Transport
    overlap: bool
    name: str
    # After gradients of arrivals, those of own rows are added to, not written over.
    adding: Tiles

    @classmethod
    def make(
        cls,
        plan: Plan,
        transport: Transport,
        device: torch.device,
        overlap: bool,
        stages: int,
        name: str = "",
    ) -> Self:
        """Put one rank's parts of a plan on its device."""
        parts = cut_parts(plan, transport.rank, stages)
        local = Segments(parts.local, plan.local_length, plan.local_length)
        kind = plan.kv_exchange if any(plan.pieces.needed > plan.pieces.tokens) else "none"
        remote = tuple(Tiles(full_tiles(stage.remote)) for stage in parts.stages)
        adding = Tiles(replace(tile, continues=True) for tile in local.tiles)
        route = _route(kind, parts, device)
        if device.type != "cpu":  # now, for a copy in the middle of a pass holds the host back
            for tiles in (local.tiles, adding, *remote):
                tiles.packed(route.gathered.device)  # `device` with its index
        return cls(
            local=local,
            remote=remote,
            route=route,
            transport=transport,
            overlap=overlap,
            name=name,
            adding=adding,
        )

    @property
    def merges(self) -> bool:
        """Some query of this rank attends own rows and arrivals."""
        return any(self.remote)

    def forward(
        self,
        kernel: TiledKernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        arrived: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend. Every rank calls it.

        Args:
            kernel: can run the call.
            query: `[n, num_heads, head_dim]`, any strides, local rows, padding included.
            key: `[n, num_kv_heads, head_dim]`.
            value: `[n, num_kv_heads, v_head_dim]`.
            scale: softmax scale.
            arrived: what arrived in an earlier call with the same K and V, on every rank or on
                none; then nothing is exchanged.

        Returns:
            `out` `[n, num_heads, v_head_dim]`, padding zero; `lse` `[n, num_heads]`; and the K
            and V that arrived, `[received, num_kv_heads, head_dim + v_head_dim]`.
        """
        arriving, rows = None, arrived
        if rows is None:
            arriving = self._start(key, value)
            rows = arriving.rows
        dims = (key.shape[-1], value.shape[-1])
        query, key, value = (_widen(x, max(dims)) for x in (query, key, value))
        # kept in the dtype of lse while pieces are merged, so that it is rounded once
        precise = kernel.lse_dtype(query.dtype)
        out = query.new_empty(query.shape, dtype=precise if self.merges else query.dtype)
        lse = query.new_empty(query.shape[:2], dtype=precise)
        for start, stop in self.local.padding:
            out[start:stop].zero_()
            lse[start:stop].fill_(-torch.inf)
        kernel.forward_tiles(self.local.tiles, query, key, value, scale, out, lse)
        for number, tiles in enumerate(self.remote if self.route.kind != "none" else ()):
            if self.overlap and arriving is not None:
                arriving.wait(number)
            keys, values = self._arrived(rows, number, dims)
            kernel.forward_tiles(tiles, query, keys, values, scale, out, lse)
        # what is returned shares no tensor with what was given, as operators must
        return _narrow(out, dims[1]).to(query.dtype), lse, rows.detach()

    def backward(
        self,
        kernel: TiledKernel,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        arrived: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of query, and of key and value side by side. Every rank calls it.

        Sums below fp32 run in fp32 and are rounded once. A gradient of an arrival that is a sum
        of several travels in fp32 too; one that the kernel made alone, and rounded, travels as it
        is.
        """
        dims = (key.shape[-1], value.shape[-1])
        width, dtype = max(dims), query.dtype
        precise = kernel.lse_dtype(dtype)
        grad_out, query, key, value, out = (
            _widen(x, width) for x in (grad_out, query, key, value, out)
        )
        travels = self.route.kind != "none"
        if self.merges:
            grad_query = query.new_zeros(query.shape, dtype=precise)
        else:
            grad_query = self._unfilled(query, width, dtype)
        sent_home = []
        for number, tiles in enumerate(self.remote if travels else ()):
            keys, values = self._arrived(arrived, number, dims)
            far = keys.new_zeros(
                (*keys.shape[:2], 2 * width), dtype=precise if self.route.wide else dtype
            )
            inputs = (grad_out, query, keys, values, out, lse, scale, grad_query, *_halves(far))
            kernel.backward_tiles(tiles, *inputs)
            sent_home.append(start_home(_pack(far, dims), self.transport, self.route, number))
        came_home = [] if self.overlap else [pending.wait() for pending in sent_home]
        near = self._unfilled(key, 2 * width, precise if travels else dtype)
        tiles = self.adding if self.merges else self.local.tiles
        inputs = (grad_out, query, key, value, out, lse, scale, grad_query, *_halves(near))
        kernel.backward_tiles(tiles, *inputs, fresh_keys=True)
        if self.overlap:
            came_home = [pending.wait() for pending in sent_home]
        total = _pack(near, dims)
        add_home(total, self.route, came_home)
        return _narrow(grad_query, dims[0]).to(dtype), total.to(dtype)

    def _start(self, key: Tensor, value: Tensor) -> Arriving:
        arriving = start_rows(key, value, self.transport, self.route)
        if not self.overlap:
            for number in range(arriving.stages):
                arriving.wait(number)
        return arriving

    def _unfilled(self, like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return a gradient of local rows that is zero on padding; local tiles fill the rest."""
        grad = like.new_empty((*like.shape[:2], width), dtype=dtype)
        for start, stop in self.local.padding:
            grad[start:stop].zero_()
        return grad

    def _arrived(self, rows: Tensor, number: int, dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return one stage's K and V as the kernel reads them: views, where heads are equal."""
        stage = self.route.stages[number]
        key, value = rows[stage.first : stage.stop].split(dims, dim=-1)
        return _widen(key, max(dims)), _widen(value, max(dims))


def _route(kind: str, parts: Parts, device: torch.device) -> StagedRoute:
    stages, first = [], 0
    for rows in parts.stages:
        stages.append(
            Stage(
                send_index=torch.from_numpy(rows.send_rows).to(device),
                send_counts=rows.send_counts,
                receive_counts=rows.receive_counts,
                reading=None if rows.reading is None else torch.from_numpy(rows.reading).to(device),
                first=first,
                stop=first + rows.received,
            )
        )
        first += rows.received
    gathered = torch.from_numpy(parts.gathered).to(device)
    return StagedRoute(kind, tuple(stages), gathered, wide=parts.shared)


def _widen(x: Tensor, width: int) -> Tensor:
    """Pad heads with zeros, which add nothing to a score and nothing to an output."""
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _narrow(x: Tensor, dim: int) -> Tensor:
    return x if x.shape[-1] == dim else x[..., :dim].contiguous()


def _halves(both: Tensor) -> tuple[Tensor, Tensor]:
    width = both.shape[-1] // 2
    return both[..., :width], both[..., width:]


def _pack(both: Tensor, dims: tuple[int, int]) -> Tensor:
    """Cut the padding of heads off."""
    if dims[0] == dims[1]:
        return both
    key, value = _halves(both)
    return torch.cat([key[..., : dims[0]], value[..., : dims[1]]], dim=-1)
