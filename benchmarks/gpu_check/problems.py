"""What is attended: rows of documents, heads, tensors, and each rank's share of them."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longpack.kernels import Segments, attend
from longpack.packing import PackedRow
from longpack.plan import Plan, plan_step

LAYOUTS = ("contiguous", "zigzag", "balanced")
SPLITS = tuple((world_size, layout) for world_size in (2, 4, 8) for layout in LAYOUTS)
WHOLE = (1, "contiguous")  # one rank is a world: one call over the whole row

# What a kernel, its package or the driver may raise: a finding, not the end of the whole check.
RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,  # a shared library
    ImportError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Heads:
    """The heads of an attention call."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def pair_flops(self) -> float:
        """Operations of a query-key pair, forward and backward: 2 matrix products and 5 more."""
        return 3.5 * 2 * self.num_heads * (self.head_dim + self.v_head_dim)

    def __str__(self) -> str:
        values = "" if self.head_dim == self.v_head_dim else f" (value {self.v_head_dim})"
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}{values}"


HEADS = (Heads(9, 3, 64, 64), Heads(16, 8, 128, 128), Heads(4, 4, 192, 128), Heads(4, 2, 40, 40))


@dataclass(frozen=True)
class Sizes:
    """Say how much to run.

    Args:
        parity_tokens, packed_tokens, single_tokens, merge_tokens: rows, in tokens.
        segment_tokens, segment_counts: a row, and into how many segments it is cut.
        matmul_side: of the matrix product that rates are compared with.
        repeats: timed rounds.
        timed_heads: how many of `HEADS` are timed.
    """

    parity_tokens: int
    packed_tokens: int
    single_tokens: int
    segment_tokens: int
    segment_counts: tuple[int, ...]
    merge_tokens: int
    matmul_side: int
    repeats: int
    timed_heads: int


GPU = Sizes(2048, 65536, 32768, 65536, (1, 8, 64, 512), 32768, 8192, repeats=20, timed_heads=2)
CPU = Sizes(512, 8192, 2048, 4096, (1, 8, 64, 512), 2048, 2048, repeats=3, timed_heads=1)
QUICK = Sizes(160, 256, 64, 64, (1, 2, 4, 8), 64, 128, repeats=1, timed_heads=1)


def packed_row(tokens: int) -> PackedRow:
    """Return documents of long-tailed lengths, then a fiftieth of padding; `tokens` rows."""
    padding = tokens // 50
    return PackedRow.from_lengths(document_lengths(tokens - padding), padding=padding)


def timed_rows(sizes: Sizes) -> dict[str, PackedRow]:
    """Return the rows that are split and timed: many documents, and a single one."""
    single = PackedRow.from_lengths([sizes.single_tokens])
    return {"packed": packed_row(sizes.packed_tokens), "single": single}


def document_lengths(tokens: int) -> list[int]:
    """Draw long-tailed document lengths that sum to `tokens`; the same on every machine."""
    generator, lengths = random.Random(0), []
    while sum(lengths) < tokens:
        drawn = math.ceil(tokens / 40 * generator.lognormvariate(0.0, 1.2))
        lengths.append(min(drawn, tokens - sum(lengths)))
    return lengths


def whole_segments(row: PackedRow) -> Segments:
    """Return the segments of a whole row: every document attends itself."""
    return Segments(tuple((a, b, a, b) for a, b in row.documents), row.length, row.length)


@dataclass(frozen=True)
class Inputs:
    """Hold `[rows, heads, dim]` tensors of a call; `grad_out` is the gradient of its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    @classmethod
    def draw(cls, rows: int, heads: Heads, dtype: torch.dtype, device: str) -> Self:
        """Draw normal numbers; the same in every call on one device."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = (
            (rows, heads.num_heads, heads.head_dim),
            (rows, heads.num_kv_heads, heads.head_dim),
            (rows, heads.num_kv_heads, heads.v_head_dim),
            (rows, heads.num_heads, heads.v_head_dim),
        )
        options = {"generator": generator, "device": device, "dtype": dtype}
        return cls(*(torch.randn(shape, **options) for shape in shapes))

    def leaves(self) -> list[Tensor]:
        """Return query, key and value as leaves that need gradients."""
        return [x.detach().requires_grad_() for x in (self.query, self.key, self.value)]

    def double(self) -> Self:
        """Return the same numbers in float64."""
        return self._map(Tensor.double)

    def pad_to(self, rows: int) -> Self:
        """Append rows of ones, which a plan may need as padding; they must not show anywhere."""
        return self._map(lambda x: F.pad(x, (0, 0, 0, 0, 0, rows - x.shape[0]), value=1.0))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(*map(function, (self.query, self.key, self.value, self.grad_out)))


@dataclass(frozen=True)
class Share:
    """One rank's part of an attention call.

    Args:
        rank: of the plan.
        area: query-key pairs, as the plan counts them.
        segments: who attends what.
        query_rows, key_rows: int64, the row of the padded whole row that each of the rank's
            query and key rows is; keys as the exchange brings them together.
    """

    rank: int
    area: int
    segments: Segments
    query_rows: Tensor
    key_rows: Tensor

    def of(self, inputs: Inputs) -> Inputs:
        """Select this rank's rows."""
        return Inputs(
            inputs.query[self.query_rows],
            inputs.key[self.key_rows],
            inputs.value[self.key_rows],
            inputs.grad_out[self.query_rows],
        )


def shares(plan: Plan, device: str) -> Iterator[Share]:
    """Yield every rank's share of an all-gather plan, in turn."""
    held = [plan.shards.rows(rank) for rank in range(plan.world_size)]
    gathered = np.concatenate(held)
    for rank, rows in enumerate(held):
        keys = gathered[plan.transfers(rank).key_rows]
        segments = Segments(plan.segments(rank), plan.local_length, keys.size)
        on_device = (torch.from_numpy(x).to(device) for x in (rows, keys))
        yield Share(rank, plan.area[rank], segments, *on_device)


def plan_split(row: PackedRow, world_size: int, layout: str) -> Plan:
    """Plan a row over ranks that gather all keys and values, so that key rows name all rows."""
    return plan_step(row, world_size, layout, kv_exchange="allgather")


def attention(kernel: str, segments: Segments) -> Callable[..., Tensor]:
    """Return a kernel's attention as a function of query, key and value."""

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(kernel, query, key, value, segments)

    return function


def name_of(dtype: torch.dtype) -> str:
    """Return `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
