"""The command: check, time within the limit, print tables, write JSON."""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from gpu_check.cases import measure_all, timed_cases
from gpu_check.clock import Clock
from gpu_check.parity import Judge, Parity
from gpu_check.problems import (
    CPU,
    GPU,
    HEADS,
    QUICK,
    SPLITS,
    WHOLE,
    name_of,
    packed_row,
    plan_split,
    timed_rows,
)
from gpu_check.report import machine, row_data, timing_data
from gpu_check.tables import show_parity, show_timing
from longpack.kernels import KERNELS, KernelCall

LIMIT_S = 300.0
RESERVE_S = 30.0  # of the limit, for what comes before the clock, the last case, and the report


def main(argv: list[str] | None = None) -> int:
    """Run every check, print tables, write JSON, and return the exit status."""
    began, arguments, console = time.monotonic(), parse(argv), Console()
    device = "cpu" if arguments.cpu else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        console.print("no CUDA device here: nothing was checked (--cpu checks the CPU kernel)")
        return 2
    sizes = QUICK if arguments.quick else CPU if arguments.cpu else GPU
    dtypes = (torch.float32, torch.bfloat16) if arguments.cpu else (torch.bfloat16, torch.float16)
    stop_after_s = max(0.0, arguments.limit_s - RESERVE_S)
    console.print(f"limit {arguments.limit_s:g} s: no timed case begins after {stop_after_s:g} s")
    clock = Clock(device, sizes.repeats, began + stop_after_s)

    reasons = obstacles(device)
    runnable = [name for name, against in reasons.items() if not against]
    refused = {name: against for name, against in reasons.items() if against}
    parities = list(check_all(runnable, sizes.parity_tokens, dtypes, device))
    show_parity(console, parities, refused)
    measured = measure_all(timed_cases(runnable, sizes, dtypes[0]), clock)
    show_timing(console, measured)

    results = {
        "command": shlex.join(["gpu_check.py", *(sys.argv[1:] if argv is None else argv)]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "sizes": asdict(sizes),
        "rows": {name: row_data(row) for name, row in timed_rows(sizes).items()},
        "timed_dtype": name_of(dtypes[0]),
        "limit_s": arguments.limit_s,
        "took_s": time.monotonic() - began,
        "not_run": refused,
        "parity": [{**asdict(p), "passed": p.passed} for p in parities],
        **timing_data(measured),
    }
    arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"{results['took_s']:.0f} s; results: {arguments.output}")
    good = runnable and all(p.passed for p in parities) and not measured.raised
    return 0 if good else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Prove and time longpack's CUDA kernels.")
    parser.add_argument("--cpu", action="store_true", help="run the CPU kernel instead")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: tests this script")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=LIMIT_S,
        help=f"seconds for all; {RESERVE_S:g} before it no timed case begins (%(default)g)",
    )
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="JSON results")
    return parser.parse_args(argv)


def obstacles(device: str) -> dict[str, list[str]]:
    """Return, for every kernel but dense, why it cannot run on this device; empty if it can."""
    call = KernelCall(device, torch.bfloat16, **asdict(HEADS[0]))
    return {
        name: kernel.reasons_against(call) for name, kernel in KERNELS.items() if name != "dense"
    }


def check_all(
    kernels: list[str], tokens: int, dtypes: tuple[torch.dtype, ...], device: str
) -> Iterator[Parity]:
    """Check every kernel on every plan, with all heads and dtypes, in each way that it runs."""
    row = packed_row(tokens)
    plans = [plan_split(row, *split) for split in (WHOLE, *SPLITS)]
    for heads in HEADS:
        for dtype in dtypes:
            judge = Judge.of(row, heads, dtype, device)
            for plan in plans:
                for kernel in kernels:
                    yield from judge.checks(kernel, plan)
