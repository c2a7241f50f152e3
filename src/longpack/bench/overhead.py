"""What a call of attention costs besides its kernels."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from longpack.bench.contenders import (
    LONGPACK,
    Attend,
    Problem,
    Tensors,
    largest_difference,
    longpack_flash,
    require_equal,
)
from longpack.bench.lengths import pack_row
from longpack.bench.timing import machine, on_threads, time_in_turn
from longpack.packing import PackedRow

LIMIT = 0.03  # of the time of a call with 8,192 rows
TINY_TOKENS = 16  # the kernels' own time on one such document is small beside what is sought


def run_overhead_bench(
    rounds: int = 30, calls: int = 50, seed: int = 0, long_tokens: int = 8192
) -> dict[str, Any]:
    """Measure the fixed cost of forward and backward of an attention call on one rank, fp32.

    It is the time of a call on one document of 16 tokens less that of torch's two flash operators
    alone, called directly on the same tensors: argument checks, the operator's dispatch, the
    autograd graph, output tensors and copies into them are all in it, and no exchange. One thread,
    as a thread pool would hide it in noise. `F.scaled_dot_product_attention` is measured alike.

    Args:
        rounds: timed rounds; figures are medians of differences within a round.
        calls: calls of a contender in a round.
        seed: picks the documents of the long row.
        long_tokens: its tokens; the cost is told as a share of its time on all threads.

    Raises:
        ResultError: a call and the kernels do not compute the same.
    """
    tiny, long = (
        Problem.of(TINY_TOKENS),
        pack_row("sqlite3_doc", long_tokens, seed, longest=long_tokens // 4),
    )
    kernels = _Kernels(tiny)
    attends = {
        LONGPACK: longpack_flash(PackedRow.from_lengths([TINY_TOKENS])),
        "torch": _torch_sdpa,
    }
    require_equal({n: largest_difference(tiny.run(a), kernels.run()) for n, a in attends.items()})
    runs: dict[str, Callable[[], Any]] = {n: _caller(tiny, a) for n, a in attends.items()}
    with on_threads(1):
        repeated = {n: _repeat(run, calls) for n, run in (runs | {"kernels": kernels.run}).items()}
        times = time_in_turn(repeated, rounds)
    call = partial(Problem.of(long.length).run, longpack_flash(long))
    long_ms = statistics.median(time_in_turn({"call": call}, rounds=5)["call"])
    fixed_us = {
        name: 1e3 / calls * _median_difference(times[name], times["kernels"]) for name in attends
    }
    return {
        "machine": machine(),
        "kernels_us": 1e3 / calls * statistics.median(times["kernels"]),
        "fixed_us": fixed_us[LONGPACK],
        "torch_fixed_us": fixed_us["torch"],
        "long_tokens": long_tokens,
        "long_call_ms": long_ms,
        "share": fixed_us[LONGPACK] / 1e3 / long_ms,
        "limit": LIMIT,
    }


class _Kernels:
    """The two operators that longpack and torch run on a document, on ready tensors."""

    def __init__(self, problem: Problem) -> None:
        self.inputs = [t.detach().transpose(1, 2) for t in problem.leaves]
        self.grad = problem.grad.transpose(1, 2)

    def run(self) -> list[torch.Tensor]:
        ops = torch.ops.aten
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(*self.inputs, is_causal=True)
        grads = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            self.grad, *self.inputs, out, lse, 0.0, True
        )
        return [x.transpose(1, 2) for x in (out, *grads)]


def _torch_sdpa(qkv: Tensors) -> torch.Tensor:
    return F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)


def _caller(problem: Problem, attend: Attend) -> Callable[[], Any]:
    """Return a call with leaves as attention takes them: no transpose of the model counts."""
    query, key, value = (t.detach().transpose(1, 2).requires_grad_() for t in problem.leaves)
    grad = problem.grad.transpose(1, 2)
    return lambda: torch.autograd.grad(attend((query, key, value)), (query, key, value), grad)


def _repeat(run: Callable[[], Any], calls: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(calls):
            run()

    return repeated


def _median_difference(times: list[float], base: list[float]) -> float:
    return statistics.median(a - b for a, b in zip(times, base, strict=True))
