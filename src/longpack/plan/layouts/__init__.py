"""Layouts: one file each, a pure function from documents and ranks to shards."""

from collections.abc import Callable

from longpack.packing import PackedRow
from longpack.plan.layouts.contiguous import contiguous
from longpack.plan.layouts.head_tail import head_tail
from longpack.plan.layouts.zigzag import zigzag
from longpack.plan.shards import Shards

Layout = Callable[[PackedRow, int], Shards]

LAYOUTS: dict[str, Layout] = {
    "contiguous": contiguous,
    "head_tail": head_tail,
    "zigzag": zigzag,
}

__all__ = ["LAYOUTS", "Layout"]
