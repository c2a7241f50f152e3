"""Attention of one packed row on one rank: against a loop over documents, and a dense mask."""

import multiprocessing
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from longpack import CpStep, PackedRow, cp_blockdiag_sdpa, plan_step
from longpack.bench.lengths import pack_row
from longpack.bench.timing import machine, matmul, ratio, time_in_turn
from longpack.collectives import as_transport

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64  # SmolLM2-135M
MEMORY_TOKENS = (4096, 8192, 16384, 32768)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """A packed row with its tensors, `[1, H, S, D]` views of `[1, S, H, D]` as models make them."""

    row: PackedRow
    leaves: Tensors
    grad: torch.Tensor

    @classmethod
    def of(cls, row: PackedRow, dtype: torch.dtype = torch.float32) -> "Problem":
        torch.manual_seed(0)
        q, k, v, grad = (
            torch.randn(1, row.length, heads, HEAD_DIM, dtype=dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )
        leaves = tuple(t.requires_grad_() for t in (q, k, v))
        return cls(row, leaves, grad)  # pyright: ignore[reportArgumentType]

    def run(self, attend: Callable[[Tensors], torch.Tensor]) -> list[torch.Tensor]:
        """Return output `[1, S, H, D]` and gradients of one forward and backward."""
        q, k, v = (t.transpose(1, 2) for t in self.leaves)
        out = attend((q, k, v)).transpose(1, 2)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)]


def longpack_flash(row: PackedRow) -> Callable[[Tensors], torch.Tensor]:
    """One rank's attention under a step, as a model calls it."""
    step = CpStep.make(plan_step(row, 1), as_transport(None))
    return lambda qkv: cp_blockdiag_sdpa(*qkv, enable_gqa=True, step=step)


def document_loop(row: PackedRow) -> Callable[[Tensors], torch.Tensor]:
    """`F.scaled_dot_product_attention` on each document in turn: no wasted work, by hand.

    Rows are cut with one `split`: slices would each fill a gradient of the whole row with zeros.
    The row has no padding.
    """
    lengths = list(row.lengths)

    def attend(qkv: Tensors) -> torch.Tensor:
        documents = zip(*(t.split(lengths, dim=2) for t in qkv), strict=True)
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            for q, k, v in documents
        ]
        return torch.cat(outs, dim=2)

    return attend


def dense_mask(row: PackedRow) -> Callable[[Tensors], torch.Tensor]:
    """One `F.scaled_dot_product_attention` call with a block-causal mask: what stock models do."""
    ids = torch.from_numpy(row.doc_ids())
    mask = ((ids[:, None] == ids[None]).tril())[None, None]

    def attend(qkv: Tensors) -> torch.Tensor:
        return F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True)

    return attend


CONTENDERS = {
    "longpack_flash": longpack_flash,
    "document_loop": document_loop,
    "dense_mask": dense_mask,
}


def run_attention_bench(
    tokens: int = 8192, rounds: int = 9, seed: int = 0, memory: bool = True
) -> dict[str, Any]:
    """Compare forward and backward of one row of sqlite3-doc lengths, fp32, heads 9/3 of 64.

    No document is longer than a quarter of the row. Results are compared for equality before
    they are timed.

    Args:
        tokens: rows of the packed row.
        rounds: timed rounds; figures are medians over rounds.
        seed: picks the documents.
        memory: also measure peak memory over growing rows, each in a process of its own.

    Returns:
        Plain data: documents, times in ms, ratios, rates in GFLOP/s, peak bytes.
    """
    row = _bench_row(tokens, seed)
    problem = Problem.of(row)
    attends = {name: make(row) for name, make in CONTENDERS.items()}
    error = _largest_difference(problem, attends)
    timed = {name: partial(problem.run, attend) for name, attend in attends.items()}
    times = time_in_turn({**timed, "matmul": matmul(1024)}, rounds)
    medians = {name: statistics.median(t) for name, t in times.items()}
    ours, flops = "longpack_flash", 14 * row.area * HEADS * HEAD_DIM  # 4 + 10 a query-key pair
    rate, limit = (f / medians[n] / 1e6 for n, f in ((ours, flops), ("matmul", 2 * 1024**3)))
    return {
        "machine": machine(),
        "row": {"tokens": row.length, "lengths": list(row.lengths), "area": row.area},
        "largest_difference": error,
        "median_ms": medians,
        "longpack_over_document_loop": ratio(times, "longpack_flash", "document_loop"),
        "dense_mask_over_longpack": ratio(times, "dense_mask", "longpack_flash"),
        "attention_gflops": rate,
        "matmul_gflops": limit,
        "fraction_of_matmul_rate": flops / (2 * 1024**3) / ratio(times, ours, "matmul"),
        "peak_bytes": _memory_table(seed) if memory else {},
    }


def _largest_difference(problem: Problem, attends: dict[str, Callable]) -> float:
    """Return the largest relative difference of outputs and gradients; raise where it is wrong."""
    found = {name: problem.run(attend) for name, attend in attends.items()}
    base = found.pop("document_loop")
    worst = max(
        ((ours - theirs).abs().max() / theirs.abs().max()).item()
        for results in found.values()
        for ours, theirs in zip(results, base, strict=True)
    )
    if worst > 1e-4:
        raise AssertionError(f"contenders differ by {worst:.1e} relative; fp32 allows 1e-4")
    return worst


def _bench_row(tokens: int, seed: int) -> PackedRow:
    return pack_row("sqlite3_doc", tokens, seed, longest=tokens // 4)


def _memory_table(seed: int) -> dict[str, dict[str, int]]:
    """Peak bytes of one forward and backward beyond its inputs, by contender and tokens.

    Empty where the system does not report peaks. A dense mask of more than 8K tokens is left
    out: it alone needs gigabytes.
    """
    if not _RESET_PEAK.exists():
        return {}
    jobs = [
        (name, tokens, seed)
        for name in ("longpack_flash", "dense_mask")
        for tokens in MEMORY_TOKENS
        if name != "dense_mask" or tokens <= 8192
    ]
    table: dict[str, dict[str, int]] = {}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        for (name, tokens, _), peak in zip(jobs, fresh.starmap(_peak, jobs, 1), strict=True):
            table.setdefault(name, {})[str(tokens)] = peak
    return table


_RESET_PEAK = Path("/proc/self/clear_refs")  # Linux: "5" lowers the recorded peak to the present


def _peak(name: str, tokens: int, seed: int) -> int:
    """Return how far one forward and backward lifts this process's resident memory, in bytes."""
    small = PackedRow.from_lengths([64])
    Problem.of(small).run(CONTENDERS[name](small))  # thread pools and code pages first
    row = _bench_row(tokens, seed)
    problem, attend = Problem.of(row), CONTENDERS[name](row)
    _RESET_PEAK.write_text("5")
    before = _status_bytes("VmRSS")
    problem.run(attend)
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(field))
