"""The fewest received rows that any layout can reach on a small row, by a solver.

Rows are cut on a grid, since a variable per token would be too many; the optimum is that of
layouts on the grid, so a layout that cuts elsewhere may even be below it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from longpack.errors import PlanError
from longpack.packing import PackedRow
from longpack.plan import plan_step

MOST_VARIABLES = 4000


@dataclass(frozen=True)
class Gap:
    """How far `balanced` is from the best layout on a grid.

    Args:
        found_tokens: received rows of all ranks under `balanced`.
        best_tokens: the fewest of any layout on the grid within the tolerance; None where the
            solver proved that there is none.
        bound_tokens: no layout on the grid can be below this, even if the solver stopped early.
        grid_tokens: rows of a grid cell.
    """

    found_tokens: int
    best_tokens: int | None
    bound_tokens: float
    grid_tokens: int

    def __str__(self) -> str:
        if self.best_tokens is None:
            return f"no layout on a grid of {self.grid_tokens} tokens is within the tolerance"
        return (
            f"balanced receives {self.found_tokens} rows; on a grid of {self.grid_tokens} tokens "
            f"the best layout found receives {self.best_tokens} and none less than "
            f"{self.bound_tokens:.0f}"
        )


def exact_gap(
    row: PackedRow, world_size: int, tolerance: float = 1.05, time_limit_s: float = 60.0
) -> Gap:
    """Compare `balanced` with the optimum of an integer program.

    Cells are at most `grid` rows and never cross a document's edge. With x[c, r] = 1 where rank r
    holds cell c and y[c, r] = 1 where it needs it (it holds a cell of the document at or after
    c): minimise needed minus owned rows, subject to one owner per cell, equal slots, and the
    area limit.

    Args:
        row: at most a few dozen documents.
        world_size: ranks; cells times ranks is kept below some thousands by the grid.
        tolerance: area max/mean.
        time_limit_s: of the solver.

    Raises:
        PlanError: too many documents and ranks for a grid to make small.
        ModuleNotFoundError: scipy, whose HiGHS solves it, is not installed.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    grid, cells = _grid(row, world_size)
    slots = -(-row.length // world_size)
    doc, size, area = cells.T
    num, ranks = len(cells), world_size
    x = np.arange(num * ranks).reshape(num, ranks)
    y = x + num * ranks
    rows = _Rows(2 * num * ranks)
    for c in range(num):
        rows.add(x[c], np.ones(ranks), 1, 1)
        for r in range(ranks):
            rows.add([y[c, r], x[c, r]], [1, -1], 0, 1)
            if c + 1 < num and doc[c + 1] == doc[c]:
                rows.add([y[c, r], y[c + 1, r]], [1, -1], 0, 1)
    limit = int(tolerance * row.area / world_size)
    for r in range(ranks):
        # padding fills what is left, so a rank may hold fewer real rows, never more
        rows.add(x[:, r], size, 0, slots)
        rows.add(x[:, r], area, 0, limit)
    cost = np.concatenate([np.zeros(num * ranks), np.repeat(size, ranks)])
    matrix, low, high = rows.matrices()
    solved = milp(
        cost,
        constraints=LinearConstraint(matrix, low, high),  # pyright: ignore[reportArgumentType]
        integrality=np.ones(2 * num * ranks),
        bounds=Bounds(0, 1),
        options={"time_limit": time_limit_s},
    )
    found = sum(plan_step(row, world_size, f"balanced:{tolerance}", "a2a").received_tokens)
    if solved.x is None:
        return Gap(found, None, float("nan"), grid)
    best = round(solved.fun) - row.tokens
    return Gap(found, best, float(solved.mip_dual_bound) - row.tokens, grid)


def _grid(row: PackedRow, world_size: int) -> tuple[int, np.ndarray]:
    """Return the finest grid that stays small, and its cells as (document, rows, area)."""
    grid = 1
    while True:
        cells = []
        for doc, length in enumerate(row.lengths):
            edges = np.append(np.arange(0, length, grid), length)
            area = np.diff(edges * (edges + 1) // 2)
            cells.append(np.stack([np.full(area.size, doc), np.diff(edges), area], axis=1))
        table = np.concatenate(cells) if cells else np.empty((0, 3), dtype=np.int64)
        if 2 * len(table) * world_size <= MOST_VARIABLES:
            return grid, table
        if len(table) == len(row):
            raise PlanError(
                f"{len(row)} documents on {world_size} ranks are too many for an exact solution: "
                f"documents times ranks may be {MOST_VARIABLES // 2}"
            )
        grid *= 2


class _Rows:
    """Constraints gathered one at a time: low <= coefficients . variables <= high."""

    def __init__(self, num_variables: int) -> None:
        self.num_variables = num_variables
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(
        self, variables: Iterable[int], coefficients: Iterable[float], low: float, high: float
    ) -> None:
        """Add one constraint."""
        at = len(self.low)
        self.entries += [
            (at, int(v), float(k)) for v, k in zip(variables, coefficients, strict=True)
        ]
        self.low.append(low)
        self.high.append(high)

    def matrices(self) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return the sparse matrix and both sides."""
        from scipy.sparse import coo_array

        row, column, value = zip(*self.entries, strict=True)
        shape = (len(self.low), self.num_variables)
        return (
            coo_array((value, (row, column)), shape=shape).tocsr(),
            np.array(self.low),
            np.array(self.high),
        )
