"""The timed cases, in the order in which they run while the time lasts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch

from gpu_check.clock import Clock
from gpu_check.merge_cost import measure_copy, measure_merge_cost, measure_merge_op
from gpu_check.problems import HEADS, RAISED, SPLITS, WHOLE, Sizes, plan_split, timed_rows
from gpu_check.ranks import measure_causal, measure_matmul, measure_split
from gpu_check.segment_cost import LENGTHS, measure_segment_cost

SECTIONS = ("matmul", "copy", "causal", "merge_op", "splits", "segment_cost", "merge_cost")


@dataclass(frozen=True)
class Case:
    """One thing to time: the section of its result, its name, and how to measure it."""

    section: str
    name: str
    measure: Callable[[Clock], Any]


@dataclass(frozen=True)
class Measured:
    """Hold the results of timed cases by section, and which have none.

    Args:
        results: by section, in the order of cases.
        left_out: names of cases for which there was no time.
        raised: what a case raised, by its name.
    """

    results: dict[str, list[Any]] = field(default_factory=lambda: {s: [] for s in SECTIONS})
    left_out: list[str] = field(default_factory=list)
    raised: dict[str, str] = field(default_factory=dict)

    def one(self, section: str) -> Any:
        """Return the only result of a section, or None where it was not measured."""
        return next(iter(self.results[section]), None)


def measure_all(cases: Iterator[Case], clock: Clock) -> Measured:
    """Measure one case after another until the time is used up, then only name them."""
    measured = Measured()
    for case in cases:
        if clock.spent():
            measured.left_out.append(case.name)
            continue
        try:
            measured.results[case.section].append(case.measure(clock))
        except RAISED as error:
            measured.raised[case.name] = f"{type(error).__name__}: {error}"
    return measured


def timed_cases(kernels: list[str], sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """Yield yardsticks, whole rows and costs, which are few, then splits over more ranks."""
    yield from _yardsticks(sizes, dtype)
    yield from _splits(kernels, sizes, dtype, (WHOLE,))
    yield from _costs(kernels, sizes, dtype)
    yield from _splits(kernels, sizes, dtype, SPLITS)


def _yardsticks(sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    side, single, merged = sizes.matmul_side, sizes.single_tokens, sizes.merge_tokens
    yield Case("matmul", "matrix product", partial(measure_matmul, side, dtype))
    yield Case("copy", "copy", partial(measure_copy, side))
    for heads in HEADS[: sizes.timed_heads]:
        call = partial(measure_causal, single, heads, dtype)
        yield Case("causal", f"torch's causal call, {heads}", call)
        yield Case("merge_op", f"merge_, {heads}", partial(measure_merge_op, heads, merged, dtype))


def _splits(
    kernels: list[str], sizes: Sizes, dtype: torch.dtype, splits: tuple[tuple[int, str], ...]
) -> Iterator[Case]:
    rows = timed_rows(sizes)
    for (world_size, layout), name in product(splits, rows):
        plan = plan_split(rows[name], world_size, layout)
        for heads, kernel in product(HEADS[: sizes.timed_heads], kernels):
            title = f"{kernel}, {heads}, {name} row, cp {world_size} {layout}"
            yield Case("splits", title, partial(measure_split, kernel, name, plan, heads, dtype))


def _costs(kernels: list[str], sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    cut = (sizes.segment_tokens, sizes.segment_counts, dtype)
    for heads, kernel in product(HEADS[: sizes.timed_heads], kernels):
        for lengths in LENGTHS:
            call = partial(measure_segment_cost, kernel, heads, lengths, *cut)
            yield Case("segment_cost", f"{kernel}, {heads}, {lengths} segments", call)
        call = partial(measure_merge_cost, kernel, heads, sizes.merge_tokens, dtype)
        yield Case("merge_cost", f"{kernel}, {heads}, two parts", call)
