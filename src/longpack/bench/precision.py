"""What splitting a row over ranks does to the precision of low-precision gradients."""

from typing import Any

import torch

from longpack.bench.contenders import Problem, document_loop, longpack_flash
from longpack.bench.thread_ranks import ThreadRanks
from longpack.bench.timing import machine, on_threads
from longpack.packing import PackedRow
from longpack.plan import Plan, plan_step

LAYOUTS = ("contiguous", "balanced", "zigzag")
RESULTS = ("out", "grad_query", "grad_key", "grad_value")


def run_precision_bench(
    tokens: int = 4096, world_sizes: tuple[int, ...] = (2, 4), dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Compare the errors of a call that is split over ranks with those of one call, both in bf16.

    The row is one document, the worst case: every rank sends gradients to all keys before its
    own. Gradients travel as longpack sends them: as the kernel rounded them, or in fp32 where a
    rank adds several for one row (zigzag). Errors are relative to fp64 on the same bf16 numbers:
    the norm of the difference over the norm.

    torch's CPU kernel rounds the gradients of keys and values after each block of queries, of 64
    rows in a call of fewer than 768 and of 256 else (torch 2.13), which outweighs what splitting
    does: to compare like with like, ranks need 768 rows or more.

    Args:
        tokens: rows of the document.
        world_sizes: ranks, threads of this process.
        dtype: of query, key, value and the output's gradient.

    Returns:
        Plain data: errors by result of the one call, and of each split with its ratio to them.
    """
    row = PackedRow.from_lengths([tokens])
    problem = Problem.of(tokens, dtype=dtype)
    exact = problem.to(torch.float64).run(document_loop(row))
    single = _errors(problem.run(longpack_flash(row)), exact)
    splits = []
    for world_size in world_sizes:
        for layout in LAYOUTS:
            plan = plan_step(row, world_size, layout, "a2a")
            errors = _errors(_run_split(problem, plan), exact)
            over = {name: errors[name] / single[name] for name in RESULTS}
            splits.append(
                {"world_size": world_size, "layout": layout, "error": errors, "over_single": over}
            )
    return {
        "machine": machine(),
        "row": {"tokens": tokens, "documents": 1, "dtype": str(dtype).removeprefix("torch.")},
        "single_error": single,
        "splits": splits,
    }


def _run_split(problem: Problem, plan: Plan) -> list[torch.Tensor]:
    """Return output and gradients `[1, S, H, D]` of all ranks, each row where it belongs."""
    with on_threads(1):
        found = ThreadRanks(plan, problem).run()
    rows = torch.cat([torch.from_numpy(plan.shards.rows(r)) for r in range(plan.world_size)])
    order = rows.argsort()[: plan.row.length]  # padding lies behind the row's end
    return [torch.cat(parts, dim=1)[:, order] for parts in zip(*found, strict=True)]


def _errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, float]:
    return {
        name: ((ours.double() - truth).norm() / truth.norm()).item()
        for name, ours, truth in zip(RESULTS, found, exact, strict=True)
    }
