"""Attention as other systems split it, written again from their descriptions, to compare with.

Both attend with the same kernel as longpack and waste nothing across documents, so that what is
compared is how work and rows are split.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from longpack.collectives import Transport
from longpack.errors import UnsupportedError
from longpack.kernels import Segments, Tile, attend, full_tiles
from longpack.kernels.impl.flash_cpu import backward_tiles, forward_tiles, lse_dtype
from longpack.packing import PackedRow
from longpack.plan import Plan
from longpack.plan.parts import cut_parts


class Ring:
    """Ring attention: whole blocks of K and V go round, everyone attends what passes by.

    Every rank's rows are a block, which travels whole to each other rank, needed there or not; in
    the backward the gradients of a block travel with it.

    Args:
        plan: its layout says which rows are a rank's block; `head_tail` is what ring systems use
            to balance one long document.
        transport: the axis.
    """

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self.transport = transport
        parts = cut_parts(plan, transport.rank)
        self.local = Segments(parts.local, plan.local_length, plan.local_length)
        self.passing = [self._tiles(plan, source) for source in self._sources()]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend local rows `[n, heads, dim]`."""
        out: Any = _Ring.apply(query, key, value, self)
        return out

    def turn(self, block: Tensor) -> Tensor:
        """Hand a block to the next rank and take the one before's."""
        rank, world, rows = self.transport.rank, self.transport.world_size, block.shape[0]
        send = [rows if r == (rank + 1) % world else 0 for r in range(world)]
        receive = [rows if r == (rank - 1) % world else 0 for r in range(world)]
        return self.transport.all_to_all(block, send, receive, direct=True)

    def _sources(self) -> list[int]:
        """Whose block passes by at each turn."""
        rank, world = self.transport.rank, self.transport.world_size
        return [(rank - turn) % world for turn in range(1, world)]

    def _tiles(self, plan: Plan, source: int) -> tuple[Tile, ...]:
        """What this rank attends of another's block: of each document, the rows before its own."""
        p = plan.pieces
        bounds = []
        for mine in np.flatnonzero(p.owner == self.transport.rank):
            theirs = np.flatnonzero((p.owner == source) & (p.doc == p.doc[mine]))
            theirs = theirs[p.start[theirs] < p.start[mine]]
            if theirs.size:
                q_start = int(p.local_start[mine])
                k_start = int(p.local_start[theirs[0]])
                keys = int((p.stop[theirs] - p.start[theirs]).sum())
                q_stop = q_start + int(p.stop[mine] - p.start[mine])
                bounds.append((q_start, q_stop, k_start, k_start + keys))
        return full_tiles(tuple(bounds))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        scale = query.shape[-1] ** -0.5
        out = torch.zeros_like(query)
        lse = query.new_zeros(query.shape[:2], dtype=lse_dtype(query.dtype))
        forward_tiles(ring.local.tiles, query, key, value, scale, out, lse)
        block = torch.cat([key, value], dim=-1)
        for tiles in ring.passing:
            block = ring.turn(block)
            forward_tiles(tiles, query, *_halves(block), scale, out, lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        scale = query.shape[-1] ** -0.5
        grad_query = torch.zeros_like(query)
        block = torch.cat([key, value], dim=-1)
        grads = torch.zeros_like(block)
        for tiles in (ring.local.tiles, *ring.passing):
            if tiles is not ring.local.tiles:  # a block and its gradients go on together
                block, grads = (ring.turn(x) for x in (block, grads))
            given = (query, *_halves(block), out, lse, scale, grad_query)
            backward_tiles(tiles, grad_out, *given, *_halves(grads))
        if ring.passing:
            grads = ring.turn(grads)
        return grad_query, *_halves(grads), None


def _halves(block: Tensor) -> tuple[Tensor, Tensor]:
    width = block.shape[-1] // 2
    return block[..., :width], block[..., width:]


class Ulysses:
    """Heads are exchanged for rows: every rank attends the whole row with its share of heads.

    Args:
        row: the packed row; ranks hold it in equal consecutive shards.
        transport: the axis.
        num_heads, num_kv_heads: must both divide by the number of ranks.

    Raises:
        UnsupportedError: heads that do not divide.
    """

    def __init__(
        self, row: PackedRow, transport: Transport, num_heads: int, num_kv_heads: int
    ) -> None:
        world = transport.world_size
        if num_heads % world or num_kv_heads % world:
            raise UnsupportedError(
                f"{num_heads}/{num_kv_heads} heads cannot be dealt to {world} ranks: Ulysses needs "
                "numbers of heads that divide by the number of ranks"
            )
        self.transport = transport
        length = -(-row.length // world) * world
        bounds = tuple((start, stop, start, stop) for start, stop in row.documents)
        self.segments = Segments(bounds, length, length)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend local rows `[n, heads, dim]`."""
        query, key, value = (_Swap.apply(x, self.transport, True) for x in (query, key, value))  # pyright: ignore
        out = attend("flash_cpu", query, key, value, self.segments)
        return _Swap.apply(out, self.transport, False)  # pyright: ignore[reportReturnType]


class _Swap(torch.autograd.Function):
    """Own rows of all heads to all rows of own heads, or back; each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transport: Transport, to_heads: bool) -> Tensor:
        ctx.transport, ctx.to_heads = transport, to_heads
        return _swap(x, transport, to_heads)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        return _swap(grad, ctx.transport, not ctx.to_heads), None, None


def _swap(x: Tensor, transport: Transport, to_heads: bool) -> Tensor:
    world = transport.world_size
    if to_heads:  # [n, P * h, D] -> [P * n, h, D]
        x = x.unflatten(1, (world, -1)).transpose(0, 1).flatten(0, 1)
    counts = [x.shape[0] // world] * world
    x = transport.all_to_all(x, counts, counts)
    if to_heads:
        return x
    return x.unflatten(0, (world, -1)).transpose(0, 1).flatten(1, 2)
