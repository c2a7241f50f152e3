"""The results as plain data for JSON, with what follows from them."""

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gpu_check.cases import Measured
from gpu_check.ranks import CausalTime, SplitTime
from longpack.packing import PackedRow


@dataclass(frozen=True)
class Fractions:
    """Compare the rate of a split with other rates; None where there is none to compare with.

    Args:
        of_whole_call: of the same kernel's one call over the whole row, same documents.
        of_causal_call: of torch's dense causal call, where the row is a single document.
        of_matmul: of the matrix product measured here.
    """

    of_whole_call: float | None
    of_causal_call: float | None
    of_matmul: float | None


def compare(split: SplitTime, measured: Measured) -> Fractions:
    """Compare a split with the yardsticks that were measured.

    Areas are equal where rows are, so a fraction of a rate is an inverse ratio of times.
    """
    splits: list[SplitTime] = measured.results["splits"]
    causal: list[CausalTime] = measured.results["causal"]
    alike = (split.kernel, split.row, split.heads)
    whole = [s.sum_ms for s in splits if s.cp == 1 and (s.kernel, s.row, s.heads) == alike]
    dense = [c.ms for c in causal if c.heads == split.heads and split.row == "single"]
    matmul_tflops = measured.one("matmul")
    return Fractions(
        of_whole_call=whole[0] / split.sum_ms if whole else None,
        of_causal_call=dense[0] / split.sum_ms if dense else None,
        of_matmul=split.tflops / matmul_tflops if matmul_tflops else None,
    )


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


def row_data(row: PackedRow) -> dict[str, object]:
    """Describe a row by its documents."""
    return {"tokens": row.length, "lengths": row.lengths, "area": row.area}


def timing_data(measured: Measured) -> dict[str, Any]:
    """Return every timed result with the figures that follow from it."""
    results = measured.results
    return {
        "matmul_tflops": measured.one("matmul"),
        "copy_gb_per_s": measured.one("copy"),
        "causal_call": [asdict(x) for x in results["causal"]],
        "splits": [_split_data(x, measured) for x in results["splits"]],
        "segment_cost": [asdict(x) for x in results["segment_cost"]],
        "merge_cost": [asdict(x) for x in results["merge_cost"]],
        "merge_op": [{**asdict(x), "gb_per_s": x.gb_per_s} for x in results["merge_op"]],
        "left_out": measured.left_out,
        "raised": measured.raised,
    }


def _split_data(split: SplitTime, measured: Measured) -> dict[str, Any]:
    derived = ("area", "flops", "sum_ms", "slowest_ms", "slowest_over_mean", "tflops")
    return {
        **asdict(split),
        **{name: getattr(split, name) for name in derived},
        **asdict(compare(split, measured)),
    }
