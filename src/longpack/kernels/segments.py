"""What one rank attends: which rows of its queries see which rows of its keys."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longpack.errors import PlanError
from longpack.kernels.packed import PackedIndex, Tiles, pack_bounds
from longpack.kernels.tiles import Bounds, cut_into_tiles


@dataclass(frozen=True, eq=False)
class Segments:
    """Say which query rows of one rank attend which key rows; build once per step.

    Law: row `q_start + i` of a segment of n queries attends exactly the keys
    `[k_start, k_stop - n + 1 + i)`: causal, aligned at the bottom right. Key ranges may overlap
    (an early and a late part of one document share keys), query ranges may not. Query rows in no
    segment are padding: their output and their gradient are exactly zero. Keys in no segment get
    exactly zero gradient.

    Args:
        bounds: (q_start, q_stop, k_start, k_stop) per segment, in rows, ascending in queries.
        num_queries: rows of the query tensor, padding included.
        num_keys: rows of the key and value tensors.

    Raises:
        PlanError: a segment is empty, longer than its keys, out of range, or out of order.
    """

    bounds: tuple[Bounds, ...]
    num_queries: int
    num_keys: int
    _on_device: dict[tuple[str, torch.device], Any] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        previous_stop = 0
        for index, (q_start, q_stop, k_start, k_stop) in enumerate(self.bounds):
            queries, keys = q_stop - q_start, k_stop - k_start
            in_range = previous_stop <= q_start and q_stop <= self.num_queries
            if not (in_range and k_start >= 0 and k_stop <= self.num_keys and 1 <= queries <= keys):
                raise PlanError(
                    f"segment {index} has queries [{q_start}, {q_stop}) and keys "
                    f"[{k_start}, {k_stop}) among {self.num_queries} query rows and "
                    f"{self.num_keys} key rows, after queries up to {previous_stop}: a segment "
                    "needs at least one query, as many keys as queries, rows inside its tensors, "
                    "and to come after the segment before it; correct `bounds`"
                )
            previous_stop = q_stop

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """Name the query rows in no segment, as (start, stop) ranges."""
        edges = [0, *(row for segment in self.bounds for row in segment[:2]), self.num_queries]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return tuple((start, stop) for start, stop in gaps if start < stop)

    @cached_property
    def keys_overlap(self) -> bool:
        """Say whether any key row belongs to more than one segment."""
        ranges = sorted((k_start, k_stop) for _, _, k_start, k_stop in self.bounds)
        return any(later[0] < earlier[1] for earlier, later in pairwise(ranges))

    @cached_property
    def tiles(self) -> Tiles:
        """Cut every segment into what a square-causal kernel can run; see `cut_into_tiles`."""
        return Tiles(cut_into_tiles(self.bounds))

    def packed(self, device: torch.device) -> PackedIndex:
        """Return the cumulative lengths and gathers of a varlen kernel, built once per device."""
        return self._once(
            "packed",
            device,
            lambda: pack_bounds(self.bounds, self.num_queries, self.num_keys, device),
        )

    def key_ranges(self, device: torch.device) -> Tensor:
        """Return [num_queries, 2] int64: first key of each row and the one past its last."""
        return self._once("key_ranges", device, lambda: _key_ranges(self).to(device))

    def _once(self, name: str, device: torch.device, build: Callable[[], Any]) -> Any:
        if (name, device) not in self._on_device:
            self._on_device[name, device] = build()
        return self._on_device[name, device]


def _key_ranges(segments: Segments) -> Tensor:
    ranges = torch.zeros(segments.num_queries, 2, dtype=torch.int64)
    for q_start, q_stop, k_start, k_stop in segments.bounds:
        ranges[q_start:q_stop, 0] = k_start
        ranges[q_start:q_stop, 1] = torch.arange(k_stop - (q_stop - q_start), k_stop) + 1
    return ranges
