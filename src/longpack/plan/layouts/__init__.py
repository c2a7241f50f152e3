"""Layouts: one file each, a pure function from documents and ranks to shards."""

import math
from collections.abc import Callable
from functools import partial

from longpack.errors import PlanError
from longpack.packing import PackedRow
from longpack.plan.layouts.balanced import TOLERANCE, balanced, why_uneven
from longpack.plan.layouts.contiguous import contiguous
from longpack.plan.layouts.head_tail import head_tail
from longpack.plan.layouts.zigzag import zigzag
from longpack.plan.shards import Shards

Layout = Callable[[PackedRow, int], Shards]

LAYOUTS: dict[str, Layout] = {
    "contiguous": contiguous,
    "head_tail": head_tail,
    "zigzag": zigzag,
    "balanced": balanced,
}


def find_layout(name: str) -> Layout:
    """Return the layout of a name; `balanced:1.1` is `balanced` with tolerance 1.1.

    Raises:
        PlanError: an unknown name, or a tolerance that is not a number or not for this layout.
    """
    base, tolerance = _parse(name)
    return LAYOUTS[base] if tolerance is None else partial(balanced, tolerance=tolerance)


def shortfall(name: str, row: PackedRow, shards: Shards) -> str | None:
    """Say why a layout misses the tolerance that its name asks for; None where it does not."""
    base, tolerance = _parse(name)
    return why_uneven(row, shards, tolerance or TOLERANCE) if base == "balanced" else None


def _parse(name: str) -> tuple[str, float | None]:
    base, colon, tolerance = name.partition(":") if isinstance(name, str) else ("", "", "")
    if base not in LAYOUTS:
        raise PlanError(
            f"layout={name!r} is unknown; it is one of {', '.join(LAYOUTS)}, balanced:1.1 for "
            "another tolerance, or auto"
        )
    if not colon:
        return base, None
    try:
        wanted = float(tolerance)
    except ValueError:
        wanted = math.nan
    if base != "balanced" or not 1 <= wanted < math.inf:
        raise PlanError(
            f"layout={name!r}: only balanced takes a tolerance, as in balanced:1.1, which must be "
            "a number of at least 1: the largest area over the mean"
        )
    return base, wanted


__all__ = ["LAYOUTS", "Layout", "find_layout", "shortfall"]
