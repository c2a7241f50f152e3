"""Is the recompute of activation checkpointing the same, with two microbatches outstanding?"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint as checkpointing

from longpack.collectives import Transport
from longpack.recompute_replay import RecomputeReplay
from longpack.verify.batches import Batch, reverse_documents
from longpack.verify.budget import half_the_digits, relative_errors
from longpack.verify.kept import Numbers, changed_numbers, kept_graphs, kept_numbers
from longpack.verify.report import CheckResult, Finding
from longpack.verify.runs import (
    Model,
    Ran,
    on_ranks,
    read_outputs,
    right_loss,
    sum_gradients,
    take_gradients,
)
from longpack.verify.subject import Subject
from longpack.verify.watch import watch_recompute

Gradients = dict[str, torch.Tensor]


def check(subject: Subject) -> CheckResult:
    """Run forward A, forward B, backward A, backward B with checkpointing; compare with without.

    Every decision that a replay channel of the model hands back is made again and compared. Each
    of the two runs has copies that have never run, as state of a first call is what a recompute
    may lack.
    """
    batches = [subject.batch, reverse_documents(subject.batch, subject.row)]
    channels = _channels(subject.model)

    def alone(transport: Transport, model: Model) -> Stepped:
        gradients = [take_gradients(model, _loss(subject, model, transport, b)) for b in batches]
        return Stepped(gradients, kept_numbers(model), kept_graphs(model))

    def interleaved(transport: Transport, model: Model) -> Stepped:
        with watch_recompute() as watch, _Checkpointed(model, subject.settings.checkpointing):
            losses = [_loss(subject, model, transport, batch) for batch in batches]
            gradients = [take_gradients(model, loss) for loss in losses]
        return Stepped(gradients, kept_numbers(model), recomputed=watch.recomputed)

    with _without_checkpointing():
        plain = on_ranks(subject, alone, fresh=True)
    with ExitStack() as stack:
        reports = {c.name: stack.enter_context(c.verify()) for c in channels}
        found = on_ranks(subject, interleaved, fresh=True)
    errors = [
        _errors(*(sum_gradients([rank.gradients[i] for rank in run]) for run in (found, plain)))
        for i in range(len(batches))
    ]
    largest = max(max(e.values()) for e in errors)
    limit = half_the_digits(subject.settings.dtype)
    recomputed = found[0].recomputed
    off = [i for i, e in enumerate(errors) if not max(e.values()) <= limit]
    findings = [_changed(off[0], errors[off[0]], limit)] if off else []
    findings += [*_counted(found[0].numbers, plain[0].numbers, limit), *_held(plain[0].graphs)]
    said = (
        f"forward A, forward B, backward A, backward B recomputed {recomputed} attention calls a "
        f"rank: gradients differ from those without checkpointing by {largest:.2g}, {limit:.2g} "
        "allowed"
    )
    if channels:
        said += (
            f"; {sum(r.checked for r in reports.values())} decisions of {len(channels)} channels "
            f"were replayed, {sum(len(r.drifts) for r in reports.values())} of which would have "
            "come out differently"
        )
    replayed = {name: str(report) for name, report in reports.items()}
    data = {"errors": errors, "recomputed": recomputed, "replayed": replayed}
    return CheckResult(said, tuple(findings), data)


@dataclass(frozen=True)
class Stepped:
    """What one rank has after both microbatches.

    Args:
        gradients: of each.
        numbers: that the model's modules hold.
        graphs: attributes that keep activations alive.
        recomputed: attention calls in recomputes.
    """

    gradients: list[Gradients]
    numbers: Numbers
    graphs: list[str] = field(default_factory=list)
    recomputed: int = 0


def _loss(subject: Subject, model: Model, transport: Transport, batch: Batch) -> torch.Tensor:
    share = subject.share(transport, batch)
    logits, _ = read_outputs(subject.call(model, share))
    return right_loss(subject.read_targets(batch), share.plan, transport.rank, logits)


@contextmanager
def _without_checkpointing() -> Iterator[None]:
    """Make every `torch.utils.checkpoint.checkpoint` call its function and no more.

    A model may checkpoint itself, where nobody can ask it not to.
    """

    def nothing(*call: Any, **options: Any) -> Iterator[None]:
        yield

    plainly = SimpleNamespace(apply=lambda function, preserve, *args: function(*args))
    with (
        patch.object(checkpointing, "_checkpoint_without_reentrant_generator", nothing),
        patch.object(checkpointing, "CheckpointFunction", plainly),
    ):
        yield


class _Checkpointed:
    """Turn checkpointing on for a while: the model's own switch, else its repeated blocks."""

    def __init__(self, model: Any, mode: str) -> None:
        self._model, self._mode = model, mode
        self._blocks: list[Any] = []

    def __enter__(self) -> None:
        if self._mode == "as_is":
            return
        reentrant = self._mode == "reentrant"
        if hasattr(self._model, "activation_checkpointing_enable"):
            self._model.activation_checkpointing_enable({"use_reentrant": reentrant})
            return
        self._blocks = repeated_blocks(self._model)
        for block in self._blocks:
            run = partial(checkpointing.checkpoint, block.forward, use_reentrant=reentrant)
            block.forward = run

    def __exit__(self, *exception: object) -> None:
        if self._mode != "as_is" and hasattr(self._model, "activation_checkpointing_disable"):
            self._model.activation_checkpointing_disable()
        for block in self._blocks:
            del block.forward  # the class's own shows again


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the members of the longest list of modules: a model's layers."""
    lists = [list(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def _channels(model: torch.nn.Module) -> list[RecomputeReplay]:
    """Return the replay channels that the model's modules hold."""
    values = (value for module in model.modules() for value in vars(module).values())
    return list({id(v): v for v in values if isinstance(v, RecomputeReplay)}.values())


def _errors(ours: Gradients, exact: Gradients) -> dict[str, float]:
    nothing = torch.zeros(1)
    errors = relative_errors(Ran(nothing, ours), Ran(nothing, exact))
    errors.pop("logits")
    return errors


def _changed(microbatch: int, errors: dict[str, float], limit: float) -> Finding:
    worst = max(errors, key=lambda name: errors[name])
    count = sum(not error <= limit for error in errors.values())
    return Finding(
        kind="recompute",
        where=worst.rpartition(".")[0] or worst,
        fact=f"{count} of {len(errors)} gradients of microbatch {'AB'[microbatch]} change with "
        f"checkpointing, most {worst} by {errors[worst]:.2g}",
        cause="the recompute reads state that is another by then (a step, a cache, a counter), or "
        "decides something anew (routes, top-k)",
        remedy="pass the step as an argument, and make decisions with RecomputeReplay.decide",
    )


def _counted(ours: Numbers, theirs: Numbers, tolerance: float) -> Iterator[Finding]:
    names = changed_numbers(ours, theirs, tolerance)
    if names:
        first = names[0]
        yield Finding(
            kind="recompute",
            where=", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else ""),
            fact=f"after both microbatches {first} is {_shown(ours[first])} with checkpointing and "
            f"{_shown(theirs[first])} without",
            cause="the forward changes it, and a recompute runs the forward again: what it counts "
            "is counted twice",
            remedy="leave it alone where longpack.recompute_replay.is_recomputing()",
        )


def _held(names: list[str]) -> Iterator[Finding]:
    if names:
        yield Finding(
            kind="kept",
            where=", ".join(names),
            fact="after backward it still holds a tensor with the activations that it came from",
            cause="a tensor with a graph was kept, of a branch that backward does not pass and so "
            "does not free",
            remedy="keep tensor.detach()",
        )


def _shown(value: torch.Tensor) -> str:
    return f"{float(value):g}" if value.numel() == 1 else f"{value.double().norm():g} in norm"
