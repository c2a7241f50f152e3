"""Are the packed row on N ranks, on one rank, and documents one by one the same?"""

import dataclasses
from collections.abc import Mapping

import torch

from longpack.verify.budget import Yardstick, half_the_digits
from longpack.verify.locate import (
    Departure,
    Trace,
    explain,
    first_departure,
    flipped_decisions,
    trace_alone,
    trace_ranks,
)
from longpack.verify.models import has_experts
from longpack.verify.report import CheckResult, Finding
from longpack.verify.runs import run_packed, watch_alone, watch_ranks
from longpack.verify.subject import Subject


def check(subject: Subject) -> CheckResult:
    """Compare logits and every parameter's gradient with documents one by one."""
    yardstick = Yardstick.of(subject)
    one = yardstick.errors(run_packed(subject, world_size=1))
    many = yardstick.errors(run_packed(subject))
    budget = {name: yardstick.budget(name) for name in many}
    over = {name: many[name] for name in many if not many[name] <= budget[name]}
    over_one = [name for name in one if not one[name] <= budget[name]]
    world = subject.settings.world_size
    worst = max(many, key=lambda name: many[name] / budget[name])
    said = (
        f"logits are {many['logits']:.2g} from documents one by one on {world} ranks, "
        f"{one['logits']:.2g} on one, {budget['logits']:.2g} allowed; of {len(many) - 1} gradients "
        f"the worst, {worst}, is off by {many[worst] / budget[worst]:.2g} times what is allowed "
        f"({yardstick.said})"
    )
    data = {
        "one_rank": one,
        "all_ranks": many,
        "budget": budget,
        "plain": dict(yardstick.plain_errors),
    }
    if not over:
        return CheckResult(said, (), data)
    flipped = _decided_by_rounding(subject)
    if flipped:
        said += (
            f"; not a finding: rounding tips near ties ({flipped}), in a wider dtype all is right"
        )
        return CheckResult(said, (), data)
    return CheckResult(said, (_parted(subject, over, budget, bool(over_one)),), data)


def _decided_by_rounding(subject: Subject) -> str:
    """Say which decisions differ, where they are why: in a wider dtype nothing is off.

    A route that tips over makes a difference of its own size, which no budget of rounding holds.
    """
    flipped = flipped_decisions(*_traces(subject))
    said = ", ".join(f"{count} rows of {path}" for path, count in flipped.items())
    if not said and has_experts(subject.model):
        said = "in routers, which do not show them"
    settings = subject.settings
    if not said or settings.dtype == torch.float64:
        return ""
    wider = torch.float32 if settings.dtype.itemsize < 4 else torch.float64
    in_wider = dataclasses.replace(subject, settings=dataclasses.replace(settings, dtype=wider))
    return "" if check(in_wider).findings else said


def _traces(subject: Subject) -> tuple[Trace, Trace, torch.Tensor]:
    """Return what every module does on the ranks and for documents one by one, and real rows."""
    ours = trace_ranks(watch_ranks(subject, tensors=True))
    theirs = trace_alone(watch_alone(subject), subject.row.length)
    return ours, theirs, torch.from_numpy(subject.row.doc_ids() > 0)


def _parted(
    subject: Subject, over: Mapping[str, float], budget: Mapping[str, float], on_one: bool
) -> Finding:
    path, own, through = _where(subject, over)
    worst = max(over, key=lambda name: over[name] / budget[name])
    packs = "already the packed row on one rank is off" if on_one else "one rank is right"
    apart = "for a packed row than for its documents alone" if on_one else "where rows are split"
    does = f"hands something else to {through}" if through else "computes something else"
    reason = explain(subject, path) if own else "what the model is given differs already"
    return Finding(
        kind="parity",
        where=path,
        fact=f"of the logits and {len(budget) - 1} gradients {len(over)} differ from documents one "
        f"by one, most {worst} by {over[worst]:.2g} where {budget[worst]:.2g} is allowed; {packs}",
        cause=reason or f"this module {does} {apart}",
        remedy="the module is the first whose output differs though its input is equal: compare "
        "what it does with rows of several documents or of another rank",
    )


def _where(subject: Subject, over: Mapping[str, float]) -> Departure:
    """Name the first module that departs in the forward; else the worst gradient."""
    if "logits" in over:
        found = first_departure(*_traces(subject), half_the_digits(subject.settings.dtype))
        if found is not None:
            return found
    worst = max(over, key=lambda name: over[name])
    return Departure(worst.rpartition(".")[0] or worst, own=True)
