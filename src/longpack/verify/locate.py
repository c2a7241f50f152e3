"""Find the module where two runs part, and say what it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longpack.plan import Plan
from longpack.verify.subject import Subject
from longpack.verify.watch import Watch

STOCK = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of one module, in the order of the whole row."""

    path: str
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


Trace = dict[tuple[str, int], Call]


class Departure(NamedTuple):
    """Where two runs part.

    Args:
        path: of the first module whose outputs differ though its inputs are equal; of the first
            whose outputs differ where there is none.
        own: there is one.
        through: a part of it, the first that is given something else; "" where there is none.
    """

    path: str
    own: bool
    through: str = ""


def trace_ranks(watched: Sequence[tuple[Watch, Plan]]) -> Trace:
    """Put the ranks' events together, rows in the order of the batch."""
    plan = watched[0][1]
    parts = [(w, torch.from_numpy(plan.shards.rows(r))) for r, (w, _) in enumerate(watched)]
    return _merge(parts, plan.padded_length)


def trace_alone(watched: Sequence[tuple[Watch, range]], length: int) -> Trace:
    """Put the events of documents that ran one by one together."""
    return _merge([(watch, torch.tensor(rows)) for watch, rows in watched], length)


def first_departure(
    ours: Trace, theirs: Trace, rows: torch.Tensor, tolerance: float
) -> Departure | None:
    """Return where two runs part; None where they do not.

    A module whose inputs already differ only passes a difference on, so the first with equal
    inputs is the one that makes it.

    Args:
        ours, theirs: two runs of one model.
        rows: bool `[S]`, the rows that should be equal.
        tolerance: largest difference that counts as equal, relative to the largest value.
    """
    passed_on = ""
    for key, call in ours.items():
        other = theirs.get(key)
        if other is None or not _differ(call.outputs, other.outputs, rows, tolerance):
            continue
        if not _differ(call.inputs, other.inputs, rows, tolerance):
            return Departure(call.path, True, passed_on)
        passed_on = passed_on or call.path
    return Departure(passed_on, False) if passed_on else None


def flipped_decisions(ours: Trace, theirs: Trace, rows: torch.Tensor) -> dict[str, int]:
    """Return on how many rows modules that give integers (routers, top-k) give other ones."""
    flipped = {}
    for key, call in ours.items():
        for name, value in call.outputs.items():
            other = theirs[key].outputs.get(name) if key in theirs else None
            if other is None or value.is_floating_point() or value.shape != other.shape:
                continue
            differ = (value != other)[: len(rows)][rows].reshape(int(rows.sum()), -1).any(1)
            if differ.any():
                flipped[call.path] = int(differ.sum())
    return flipped


def explain(subject: Subject, path: str) -> str:
    """Say what a module has that longpack does not honour or that mixes rows by itself."""
    module = dict(subject.model.named_modules()).get(path, subject.model)
    reasons = [say(module) for say in _REASONS]
    if subject.is_transformers:
        from longpack.integrations.huggingface import find_faults

        used = subject.attn_implementation
        faults = find_faults(module, "longpack" if used in STOCK else used)
        reasons += [fault.rstrip(": ") for fault in faults]
        if faults and used in STOCK:
            reasons.append(
                f"{used} masks documents by position_ids alone, and no more once there is a cache "
                "(use_cache) or an attention_mask"
            )
    config = getattr(module, "config", None)
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    longest = max(subject.row.lengths, default=0)
    if isinstance(window, int) and window < longest:
        reasons.append(
            f"its sliding_window of {window} tokens, shorter than the longest document of "
            f"{longest}, is not honoured"
        )
    return "; ".join(reason for reason in reasons if reason)


def _convolves(module: torch.nn.Module) -> str:
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d)
    own = isinstance(module, kinds) or any(isinstance(m, kinds) for m in module.children())
    return "a convolution along the row knows neither documents nor other ranks" if own else ""


def _recurs(module: torch.nn.Module) -> str:
    if not isinstance(module, torch.nn.RNNBase):
        return ""
    return "a recurrent layer carries its state from one document into the next"


def _averages(module: torch.nn.Module) -> str:
    if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return ""
    return "batch normalisation averages over the rows of all documents"


_REASONS: tuple[Callable[[torch.nn.Module], str], ...] = (_convolves, _recurs, _averages)


def _merge(parts: Sequence[tuple[Watch, torch.Tensor]], length: int) -> Trace:
    merged: Trace = {}
    for watch, rows in parts:
        times: dict[str, int] = {}
        for event in watch.events:
            number = times[event.path] = times.get(event.path, -1) + 1
            call = merged.setdefault((event.path, number), Call(event.path, {}, {}))
            _place(call.inputs, event.inputs, rows, length)
            _place(call.outputs, event.outputs, rows, length)
    return merged


def _place(
    whole: dict[str, torch.Tensor], part: dict[str, torch.Tensor], rows: torch.Tensor, length: int
) -> None:
    for name, value in part.items():
        if name not in whole:
            whole[name] = value.new_zeros((length, *value.shape[1:]))
        if whole[name].shape[1:] == value.shape[1:]:
            whole[name][rows] = value


def _differ(
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    rows: torch.Tensor,
    tolerance: float,
) -> bool:
    return any(
        _distance(ours[name], theirs[name], rows) > tolerance
        for name in ours.keys() & theirs.keys()
        if ours[name].shape[1:] == theirs[name].shape[1:]
    )


def _distance(ours: torch.Tensor, theirs: torch.Tensor, rows: torch.Tensor) -> float:
    """Return the largest difference on some rows, over the largest value there."""
    length = len(rows)
    a, b = ours[:length][rows].double(), theirs[:length][rows].double()
    if not a.numel():
        return 0.0
    largest = max(float(b.abs().max()), torch.finfo(torch.float64).tiny)
    distance = float((a - b).abs().max()) / largest
    return distance if distance == distance else float("inf")
