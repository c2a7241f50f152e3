"""Prove every CUDA attention kernel of longpack on this machine, and time it: one command.

    python benchmarks/gpu_check.py                # on a GPU: under five minutes
    python benchmarks/gpu_check.py --cpu --quick  # the same checks with the CPU kernel, in seconds

Parity: outputs and gradients of one rank of several plans against dense float64 attention. The
error may be at most twice that of torch's own attention with a full mask in the same dtype.
Timing: medians, as TFLOP/s and as a fraction of the matrix product rate measured here.

Exit status: 0 every kernel that can run is right, 1 one is not, 2 there is no CUDA device.
"""

import argparse
import json
import math
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longpack.kernels import KERNELS, KernelCall, Segments, attend
from longpack.packing import PackedRow
from longpack.plan import plan_step

WORLDS = ((1, "contiguous"), *((n, name) for n in (2, 4, 8) for name in ("contiguous", "zigzag")))
HEADS = ((9, 3, 64, 64), (16, 8, 128, 128), (4, 4, 192, 128), (4, 2, 40, 40))  # Hq, Hkv, D, Dv
ALLOWED_ERROR_RATIO = 2.0
PARTS = ("out", "dquery", "dkey", "dvalue")


@dataclass(frozen=True)
class Sizes:
    """Say how much to run: row lengths in tokens, repeats, and the side of the matrix product."""

    parity_tokens: int
    timed_tokens: int
    repeats: int
    matmul_side: int


GPU = Sizes(parity_tokens=2048, timed_tokens=65536, repeats=20, matmul_side=8192)
CPU = Sizes(parity_tokens=1024, timed_tokens=8192, repeats=3, matmul_side=2048)
QUICK = Sizes(parity_tokens=160, timed_tokens=256, repeats=1, matmul_side=128)


@dataclass(frozen=True)
class Parity:
    """Hold one parity check; `error_ratio` is the error over that of torch's own attention."""

    kernel: str
    case: str
    dtype: str
    heads: tuple[int, ...]
    error_ratio: dict[str, float]
    padding_is_zero: bool

    @property
    def passed(self) -> bool:
        """Say whether every part stays inside its budget and padding rows are exactly zero."""
        worst = max(self.error_ratio.values())
        return self.padding_is_zero and worst <= ALLOWED_ERROR_RATIO


@dataclass(frozen=True)
class Timing:
    """Hold medians of one timed case; the fraction is of the measured matrix product rate."""

    kernel: str
    case: str
    dtype: str
    heads: tuple[int, ...]
    forward_ms: float
    forward_backward_ms: float
    forward_backward_tflops: float
    fraction_of_matmul: float


def cases(tokens: int) -> Iterator[tuple[str, Segments]]:
    """Yield the busiest rank of every world over one row of documents with padding at its end."""
    row = PackedRow.from_lengths(document_lengths(tokens - tokens // 50), padding=tokens // 50)
    for world_size, layout in WORLDS:
        plan = plan_step(row, world_size=world_size, layout=layout, kv_exchange="a2a")
        rank = max(range(world_size), key=lambda r: plan.area[r])
        num_keys = len(plan.transfers(rank).key_rows)
        name = f"{layout} rank {rank} of {world_size}"
        yield name, Segments(plan.segments(rank), plan.local_length, num_keys)


def document_lengths(tokens: int) -> list[int]:
    """Draw long-tailed document lengths that sum to `tokens`; the same on every machine."""
    generator, lengths = random.Random(0), []
    while sum(lengths) < tokens:
        drawn = math.ceil(tokens / 40 * generator.lognormvariate(0.0, 1.2))
        lengths.append(min(drawn, tokens - sum(lengths)))
    return lengths


def draw(segments: Segments, heads: tuple[int, ...], dtype: torch.dtype, device: str):
    """Draw query, key, value that need gradients, and a gradient of the output."""
    num_heads, num_kv_heads, head_dim, v_head_dim = heads
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (segments.num_queries, num_heads, head_dim),
        (segments.num_keys, num_kv_heads, head_dim),
        (segments.num_keys, num_kv_heads, v_head_dim),
        (segments.num_queries, num_heads, v_head_dim),
    )
    drawn = [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]
    return [x.requires_grad_() for x in drawn[:3]], drawn[3]


def run(function: Callable[..., Tensor], leaves: list[Tensor], grad_out: Tensor) -> list[Tensor]:
    """Return output and gradients."""
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def masked_sdpa(segments: Segments, device: str) -> Callable[..., Tensor]:
    """Return torch's own attention with the segments as a full mask; padding rows see all keys.

    Value heads are padded to the size of key heads, which keeps torch on a fused kernel: its
    fallback computes in float32 and would be a different yardstick.
    """
    first, stop = segments.key_ranges(torch.device(device)).unsqueeze(-1).unbind(1)
    keys = torch.arange(segments.num_keys, device=device)
    mask = (keys >= first) & (keys < stop)
    padding = stop == 0

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | padding)
        out = out[0, ..., : value.shape[-1]].transpose(0, 1)
        return out.masked_fill(padding[..., None], 0.0)

    return function


def check_parity(
    kernel: str, case: str, segments: Segments, heads: tuple[int, ...], dtype: torch.dtype, device
) -> Parity:
    """Compare one kernel with dense float64, in units of the error of torch's own attention."""
    leaves, grad_out = draw(segments, heads, dtype, device)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = run(lambda q, k, v: attend("dense", q, k, v, segments), exact_leaves, grad_out.double())
    plain = run(masked_sdpa(segments, device), leaves, grad_out)
    ours = run(lambda q, k, v: attend(kernel, q, k, v, segments), leaves, grad_out)
    floor = torch.finfo(dtype).eps / 8  # rounding alone; torch's error may be zero by luck
    ratio = {}
    for part, e, p, o in zip(PARTS, exact, plain, ours, strict=True):
        budget = max((p.double() - e).norm().item(), floor * e.norm().item())
        ratio[part] = (o.double() - e).norm().item() / budget if budget else 0.0
    zero = all(not x[a:b].any() for x in ours[:2] for a, b in segments.padding)
    return Parity(kernel, case, name_of(dtype), heads, ratio, zero)


def measure(
    kernel: str,
    case: str,
    segments: Segments,
    heads: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    repeats: int,
    matmul_tflops: float,
) -> Timing:
    """Time one kernel; a backward is 2.5 forwards of 4 x head_dim flops per query-key pair."""
    leaves, grad_out = draw(segments, heads, dtype, device)

    def forward() -> None:
        with torch.no_grad():
            attend(kernel, leaves[0], leaves[1], leaves[2], segments)

    forward_ms = median_ms(forward, device, repeats)
    both_ms = median_ms(
        lambda: run(lambda q, k, v: attend(kernel, q, k, v, segments), leaves, grad_out),
        device,
        repeats,
    )
    pairs = sum(
        (q_stop - q_start) * (2 * (k_stop - k_start) - (q_stop - q_start) + 1) // 2
        for q_start, q_stop, k_start, k_stop in segments.bounds
    )
    tflops = 3.5 * pairs * 2 * (heads[2] + heads[3]) * heads[0] / both_ms / 1e9
    fraction = tflops / matmul_tflops
    return Timing(kernel, case, name_of(dtype), heads, forward_ms, both_ms, tflops, fraction)


def measure_matmul(side: int, dtype: torch.dtype, device: str, repeats: int) -> float:
    """Return the TFLOP/s of a square matrix product."""
    a = torch.randn(side, side).to(device, dtype)
    return 2 * side**3 / median_ms(lambda: a @ a, device, repeats) / 1e9


def median_ms(function: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median wall time of a call in ms, device work included, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def obstacles(device: str) -> dict[str, list[str]]:
    """Return, for every kernel of this device but dense, why it cannot run; empty if it can."""
    dtype = torch.bfloat16
    return {
        name: kernel.reasons_against(KernelCall(device, dtype, *HEADS[0]))
        for name, kernel in KERNELS.items()
        if name != "dense"
    }


def name_of(dtype: torch.dtype) -> str:
    """Return `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def machine(device: str) -> dict[str, object]:
    """Say what ran this."""
    packages = {}
    for package in ("torch", "flash-attn", "transformer-engine"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = None
    gpu = None
    if device == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        gpu = f"{torch.cuda.get_device_name()}, capability {capability}, CUDA {torch.version.cuda}"
    return {
        "gpu": gpu,
        "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": packages,
    }


def show(
    console: Console,
    refused: dict[str, list[str]],
    parities: list[Parity],
    timings: list[Timing],
) -> None:
    """Print what ran as tables, and what did not with its reasons."""
    table = Table("kernel", "dtype", "checks", "failed", "worst error ratio", title="Parity")
    for kernel, dtype in dict.fromkeys((p.kernel, p.dtype) for p in parities):
        mine = [p for p in parities if (p.kernel, p.dtype) == (kernel, dtype)]
        failed = sum(not p.passed for p in mine)
        worst = max(max(p.error_ratio.values()) for p in mine)
        table.add_row(kernel, dtype, str(len(mine)), str(failed), f"{worst:.2f}")
    console.print(table)
    for p in parities:
        if not p.passed:
            console.print(f"FAILED {p}")
    table = Table("kernel", "case", "forward ms", "+ backward ms", "TFLOP/s", "of matmul")
    for t in timings:
        numbers = (t.forward_ms, t.forward_backward_ms, t.forward_backward_tflops)
        table.add_row(
            t.kernel, t.case, *(f"{x:.3g}" for x in numbers), f"{t.fraction_of_matmul:.0%}"
        )
    console.print(table)
    for kernel, reasons in refused.items():
        console.print(f"not run: {kernel}: {', '.join(reasons)}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Prove and time longpack's CUDA kernels.")
    parser.add_argument("--cpu", action="store_true", help="run the CPU kernel instead")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: tests this script")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="JSON results")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run every check, print tables, write JSON, and return the exit status."""
    arguments, console = parse(argv), Console()
    device = "cpu" if arguments.cpu else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        console.print("no CUDA device here: nothing was checked (--cpu checks the CPU kernel)")
        return 2
    sizes = QUICK if arguments.quick else CPU if arguments.cpu else GPU
    dtypes = (torch.bfloat16, torch.float32 if arguments.cpu else torch.float16)
    reasons = obstacles(device)
    runnable = [name for name, against in reasons.items() if not against]
    refused = {name: against for name, against in reasons.items() if against}
    parities = [
        check_parity(kernel, case, segments, heads, dtype, device)
        for case, segments in cases(sizes.parity_tokens)
        for heads in HEADS
        for dtype in dtypes
        for kernel in runnable
    ]
    matmul_tflops = measure_matmul(sizes.matmul_side, dtypes[0], device, sizes.repeats)
    timings = [
        measure(kernel, case, segments, heads, dtypes[0], device, sizes.repeats, matmul_tflops)
        for case, segments in cases(sizes.timed_tokens)
        for heads in HEADS[: 1 if arguments.cpu else 2]
        for kernel in runnable
    ]
    show(console, refused, parities, timings)
    results = {
        "command": shlex.join(["gpu_check.py", *(sys.argv[1:] if argv is None else argv)]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "sizes": asdict(sizes),
        "matmul_tflops": matmul_tflops,
        "not_run": refused,
        "parity": [{**asdict(p), "passed": p.passed} for p in parities],
        "timing": [asdict(t) for t in timings],
    }
    arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"results: {arguments.output}")
    return 0 if runnable and all(p.passed for p in parities) else 1


if __name__ == "__main__":
    sys.exit(main())
