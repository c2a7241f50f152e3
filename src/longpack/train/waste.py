"""Warn once when a layout makes ranks wait for each other."""

import warnings
from collections import deque
from collections.abc import Callable
from statistics import fmean

from longpack.errors import LongpackWarning
from longpack.train.config import ParallelSection
from longpack.train.metrics import Traffic

RECENT = 20  # steps: one uneven row is no reason to warn


class WasteWatch:
    """The share of attention that ranks wait, averaged over recent steps.

    Args:
        parallel: the layout, and the share that is too much.
    """

    def __init__(self, parallel: ParallelSection) -> None:
        self._parallel, self._warned = parallel, False
        self._recent: deque[float] = deque(maxlen=RECENT)

    def see(self, waste: float, traffic_as: Callable[[ParallelSection], Traffic]) -> None:
        """Take in a step, and warn if it is time.

        Args:
            waste: of the step, `Traffic.attention_waste`.
            traffic_as: counts the step as another layout would run it; called at most once.

        Warns:
            LongpackWarning: once, with what the last step would waste in layout `balanced`.
        """
        self._recent.append(waste)
        mean, limit = fmean(self._recent), self._parallel.warn_waste
        if self._warned or len(self._recent) < RECENT or mean <= limit:
            return
        self._warned = True
        other = traffic_as(self._parallel.model_copy(update={"layout": "balanced"}))
        remedy = (
            f'set parallel.layout = "balanced", which would waste {other.attention_waste:.0%} of '
            f"the last step instead of {waste:.0%}"
            if other.attention_waste < waste
            else "no layout mends it: raise run.rows_per_step, or lower data.document_length"
        )
        warnings.warn(
            f"over the last {RECENT} steps ranks waited {mean:.0%} of their attention for the "
            f"busiest, more than parallel.warn_waste = {limit:.0%}: layout "
            f"{self._parallel.layout!r} shares these documents unevenly; {remedy}",
            LongpackWarning,
            stacklevel=2,
        )
