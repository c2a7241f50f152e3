"""A layout that makes ranks wait is named once, with what to use instead."""

import re
import warnings

import pytest

from longpack import PackedRow, plan_step
from longpack.errors import LongpackWarning
from longpack.plan import LayerShape
from longpack.train.config import ParallelSection
from longpack.train.metrics import Traffic, loads_of
from longpack.train.rows import Row
from longpack.train.waste import RECENT, WasteWatch

ATTENTION = LayerShape(linear_parameters=0)  # the step is attention alone


def warned(lengths, steps, shape=ATTENTION, **parallel):
    """Return what a run of equal steps warns of, on two ranks."""
    rows = [Row(tokens=None, documents=PackedRow.from_lengths(lengths))]
    parallel = ParallelSection(cp=2, **parallel)
    plan = plan_step(rows[0].documents, 2, parallel.layout)
    waste = Traffic.of_loads(loads_of([plan]), shape).step_waste
    watch = WasteWatch(parallel, shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            watch.see(waste, rows)
    assert all(w.category is LongpackWarning for w in caught)
    return [str(w.message) for w in caught]


def test_waste_is_warned_of_once_with_the_layout_that_mends_it():
    """One document of 256 over two halves: areas 1 : 3, so the mean is 2/3 of the busiest."""
    assert warned([256], RECENT - 1) == []
    (said,) = warned([256], 3 * RECENT)
    assert "waited 33% of the step" in said
    instead = r'set parallel.layout = "balanced", which would waste [0-5]% of .* instead of 33%'
    assert re.search(instead, said)


@pytest.mark.parametrize(
    ("lengths", "parallel"),
    [
        ([256], {"warn_waste": 0.34}),
        ([256], {"layout": "balanced"}),
        ([64] * 4, {}),
        ([256], {"shape": LayerShape()}),  # attention is a small share of short rows
    ],
)
def test_what_is_even_enough_is_not_warned_of(lengths, parallel):
    assert warned(lengths, 2 * RECENT, **parallel) == []


def test_where_no_layout_helps_the_warning_says_so():
    (said,) = warned([1], RECENT)
    assert "no layout mends it" in said


def test_the_better_layout_is_judged_over_all_replicas():
    """Each replica is even by itself, yet one has 64 times the pairs of the other."""
    lengths = ([1] * 256, [128, 128])
    rows = [Row(tokens=None, documents=PackedRow.from_lengths(n)) for n in lengths]
    watch = WasteWatch(ParallelSection(cp=2, dp=2, warn_waste=0), ATTENTION)
    for _ in range(RECENT - 1):
        watch.see(0.9, rows)
    area = 256, 2 * 128 * 129 // 2
    wasted = 1 - sum(area) / 2 / max(area)
    with pytest.warns(LongpackWarning, match=f"would waste {wasted:.0%} .* instead of 90%"):
        watch.see(0.9, rows)
