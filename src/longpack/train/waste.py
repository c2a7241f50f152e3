"""Warn once when a layout makes ranks wait for each other."""

import warnings
from collections import deque
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from longpack.errors import LongpackWarning
from longpack.plan import LayerShape, plan_step
from longpack.train.config import ParallelSection
from longpack.train.metrics import loads_of, step_waste
from longpack.train.rows import Row

RECENT = 20  # steps: one uneven row is no reason to warn


class WasteWatch:
    """The share of a step that ranks wait, averaged over recent steps.

    Args:
        parallel: the layout, and the share that is too much.
        shape: of the model.
    """

    def __init__(self, parallel: ParallelSection, shape: LayerShape) -> None:
        self._parallel, self._shape, self._warned = parallel, shape, False
        self._recent: deque[float] = deque(maxlen=RECENT)

    def see(self, waste: float, rows: Sequence[Row]) -> None:
        """Take in a step, and warn if it is time.

        Args:
            waste: of the step, `Traffic.step_waste`.
            rows: of the step, all replicas'; planned anew once, when the warning comes.

        Warns:
            LongpackWarning: once, with what the last step would waste in layout `balanced`.
        """
        self._recent.append(waste)
        mean, limit = fmean(self._recent), self._parallel.warn_waste
        if self._warned or len(self._recent) < RECENT or mean <= limit:
            return
        self._warned = True
        other = self._waste_in("balanced", rows)
        remedy = (
            f'set parallel.layout = "balanced", which would waste {other:.0%} of the last step '
            f"instead of {waste:.0%}"
            if other < waste
            else "no layout mends it: raise run.rows_per_step, or lower data.document_length"
        )
        warnings.warn(
            f"over the last {RECENT} steps ranks waited {mean:.0%} of the step for the slowest, "
            f"more than parallel.warn_waste = {limit:.0%}: layout "
            f"{self._parallel.layout!r} shares these documents unevenly; {remedy}",
            LongpackWarning,
            stacklevel=2,
        )

    def _waste_in(self, layout: str, rows: Sequence[Row]) -> float:
        cp, dp = self._parallel.cp, self._parallel.dp
        plans = [plan_step(row.documents, cp, layout) for row in rows]
        loads = [loads_of(plans[replica::dp]) for replica in range(dp)]
        return step_waste(np.concatenate(loads, axis=1), self._shape)
