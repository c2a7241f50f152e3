"""Run copies of the model: on all ranks, on one, and document by document."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as checkpointing

from longpack.blockdiag_cp import ShardedBatch
from longpack.collectives import Loopback, Transport, collect_votes
from longpack.errors import (
    AgreementError,
    CollectiveError,
    LongpackError,
    PackingError,
    ReplayError,
    StepError,
    UnsupportedError,
)
from longpack.loss import IGNORE, count_targets, cross_entropy
from longpack.plan import Plan
from longpack.verify.batches import Batch
from longpack.verify.report import Finding
from longpack.verify.subject import Subject
from longpack.verify.watch import Watch, catch_inputs, ranks_apart, watch_forward

T = TypeVar("T")
Model = torch.nn.Module

KINDS = {
    PackingError: "documents",
    UnsupportedError: "argument",
    StepError: "step",
    AgreementError: "agreement",
    CollectiveError: "hang",
    ReplayError: "recompute",
    checkpointing.CheckpointError: "recompute",
}


# Cause and remedy, by kind; else by whether longpack raised it.
_WHY = {
    "hang": (
        "all ranks must make the same exchanges in the same order, and one did not come to this",
        "see what the rank that is waited for ran instead, or where it stopped",
    ),
    "agreement": (
        "the data loader gives the ranks of one cp axis different rows",
        "seed and shard the loader by the dp rank alone, not by the global rank",
    ),
    "recompute": (
        "the recompute of a checkpoint does not do what its forward did: it reads state that is "
        "another by then (a step, a cache, what a first call builds), or decides anew",
        "pass the step as an argument, build state before the forward, and make decisions with "
        "RecomputeReplay.decide",
    ),
}
_WHY_OURS = {
    True: (
        "longpack refuses what it cannot compute rightly",
        "the message names the argument or layer to change",
    ),
    False: (
        "the model, or what calls it, raised",
        "run the model on one rank with this batch, and follow the traceback",
    ),
}


class RunFailedError(Exception):
    """The model raised.

    Args:
        finding: says what.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def _describe(error: BaseException) -> Finding:
    kind = next((k for cls, k in KINDS.items() if isinstance(error, cls)), None)
    kind = kind or ("recompute" if _came_from_recompute(error) else "raised")
    cause, remedy = _WHY.get(kind) or _WHY_OURS[isinstance(error, LongpackError)]
    return Finding(
        kind=kind,
        where=" of ".join(filter(None, getattr(error, "__notes__", ()))) or "the model",
        fact=f"{type(error).__name__}: {error}".partition("\n\nTip:")[0].rstrip(".\n"),
        cause=cause,
        remedy=remedy,
    )


def _came_from_recompute(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f.name for f in frames if f.filename == checkpointing.__file__]
    return bool({"unpack_hook", "backward"} & set(inside))


@dataclass
class JoinedRanks:
    """Ranks that are processes, seen from one of them: every rank runs the same doctor.

    Args:
        transport: this rank's end of the cp axis.
        device: of the model's copies.
        parted: ranks no longer meet, so that nothing more can run.
    """

    transport: Transport
    device: torch.device
    parted: bool = False
    world_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.world_size = self.transport.world_size

    def run(self, body: Callable[[Transport], T]) -> list[T]:
        """Call `body` here, as every rank does, and return all ranks' values.

        Raises:
            RunFailedError: `body` raised on some rank; the same on every rank.
            CollectiveError: another rank does not come; here, whatever `body` raised.
        """
        error: BaseException | None = None
        value: Any = None
        try:
            value = body(self.transport)
        except BaseException as raised:  # noqa: BLE001 -- told to the others, then raised again
            error, value = raised, _describe(raised)
            self.transport.enter(f"after {type(raised).__name__}: {raised}")  # for who waits here
        try:
            self._meet()
            votes = collect_votes(self.transport, value, None if error is None else repr(error))
        except CollectiveError as late:
            self.parted = True
            raise error or late from None
        found: list[Any] = [vote.value for vote in votes if vote.failure is not None]
        if found:  # a rank that only waited for a failed one says less than the failed one
            raise RunFailedError(next((f for f in found if f.kind != "hang"), found[0])) from error
        return [vote.value for vote in votes]  # pyright: ignore[reportReturnType]

    def _meet(self) -> None:
        """Wait for the others in an operation that no attention makes.

        Where this rank has raised, another may wait in an exchange. Gloo ends the process of who
        answers that with rows of another size, and lets wait who answers with another operation.
        """
        self.transport.all_reduce(torch.zeros(1, device=self.device))


@dataclass(frozen=True, eq=False)
class Ran:
    """One forward and backward of one row, put together over its ranks.

    Args:
        logits: `[S, vocab]` in the order of the batch.
        gradients: of the mean loss over the row's targets, by parameter.
    """

    logits: torch.Tensor
    gradients: Mapping[str, torch.Tensor]


def on_ranks(
    subject: Subject,
    body: Callable[[Transport, Model], T],
    world_size: int | None = None,
    fresh: bool = False,
) -> list[T]:
    """Call `body(transport, model)` on every rank, each with a copy of its own.

    Args:
        subject: its ranks run.
        body: may raise anything, as the user's model may.
        world_size: another number of ranks, as threads of this process.
        fresh: copies that have never run, without what a first call builds.

    Raises:
        RunFailedError: some rank raised.
    """
    ranks = Loopback(world_size) if world_size else subject.ranks

    def copy(rank: int) -> Model:
        return subject.copy(subject.settings.dtype) if fresh else subject.replica(rank)

    def noted(transport: Transport) -> T:
        try:
            return body(transport, models.get(transport.rank) or copy(transport.rank))
        except BaseException as error:
            error.add_note(f"rank {transport.rank}")
            raise

    # Threads share torch's random stream and must not build modules: copy first.
    threads = range(ranks.world_size) if isinstance(ranks, Loopback) else ()
    models = {rank: copy(rank) for rank in threads}
    try:
        with ranks_apart():
            return ranks.run(noted)
    except (KeyboardInterrupt, SystemExit, RunFailedError):
        raise
    except BaseException as error:  # a patient may raise anything
        raise RunFailedError(_describe(error)) from error


def run_packed(subject: Subject, world_size: int | None = None) -> Ran:
    """Run the packed row on the ranks, forward and backward of the right loss."""

    def body(transport: Transport, model: Model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        share = subject.share(transport, None if world_size is None else subject.batch)
        logits, _ = read_outputs(subject.call(model, share))
        loss = right_loss(subject.targets, share.plan, transport.rank, logits)
        gradients = take_gradients(model, loss)
        return _whole(subject, share, logits.detach()), gradients

    real = torch.from_numpy(subject.row.doc_ids() > 0)
    found = on_ranks(subject, body, world_size)
    return Ran(found[0][0] * real[:, None], sum_gradients([gradients for _, gradients in found]))


def run_alone(subject: Subject, dtype: torch.dtype) -> Ran:
    """Run each document by itself on one rank with stock attention: what is right.

    Raises:
        RunFailedError: the model raised.
    """
    model = subject.copy(dtype, stock=True)
    pieces: dict[int, torch.Tensor] = {}
    count = count_targets(subject.targets)
    try:
        for start, stop in subject.row:
            logits, _ = read_outputs(subject.call_alone(model, start, stop))
            targets = subject.targets[start:stop].to(logits.device)
            cross_entropy(logits[0], targets, count).backward()
            pieces[start] = logits.detach()[0].cpu()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a patient may raise anything
        error.add_note("documents that run one by one")
        raise RunFailedError(_describe(error)) from error
    vocab = next(iter(pieces.values())).shape[-1]
    whole = next(iter(pieces.values())).new_zeros((subject.row.length, vocab))
    for start, piece in pieces.items():
        whole[start : start + len(piece)] = piece
    return Ran(whole, _gradients(model))


def packed_logits(subject: Subject, batch: Batch | None = None) -> torch.Tensor:
    """Return the logits `[S, vocab]` of a batch on the ranks, without gradients."""

    def body(transport: Transport, model: Model) -> torch.Tensor:
        with torch.no_grad():
            share = subject.share(transport, batch)
            logits, _ = read_outputs(subject.call(model, share))
            return _whole(subject, share, logits)

    return on_ranks(subject, body)[0]


def read_inputs(subject: Subject) -> list[tuple[dict[str, torch.Tensor], Plan]]:
    """Return the tensors that every rank's model is given, by name, and its plan.

    The model itself does not run: what it is given may be why it cannot.
    """

    def body(transport: Transport, model: Model) -> tuple[dict[str, torch.Tensor], Plan]:
        share = subject.share(transport)
        with catch_inputs(model) as given:
            subject.call(model, share)
        return given, share.plan

    return on_ranks(subject, body)


def watch_ranks(
    subject: Subject, batch: Batch | None = None, tensors: bool = False
) -> list[tuple[Watch, Plan]]:
    """Run one forward on the ranks without gradients; return what each did, and its plan."""

    def body(transport: Transport, model: Model) -> tuple[Watch, Plan]:
        share = subject.share(transport, batch)
        with torch.no_grad(), watch_forward(model, share.plan.local_length, tensors) as watch:
            subject.call(model, share)
        return watch, share.plan

    return on_ranks(subject, body)


def watch_alone(subject: Subject) -> list[tuple[Watch, range]]:
    """Run each document by itself and keep what every module is given and gives."""
    model = subject.copy(subject.settings.dtype, stock=True)
    seen = []
    for start, stop in subject.row:
        with torch.no_grad(), watch_forward(model, stop - start, tensors=True) as watch:
            subject.call_alone(model, start, stop)
        seen.append((watch, range(start, stop)))
    return seen


def right_loss(targets: torch.Tensor, plan: Plan, rank: int, logits: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the mean loss over the whole row's targets `[S]`."""
    mine = local_rows(targets, plan, rank).to(logits.device)
    return cross_entropy(logits[0], mine, count_targets(targets))


def local_rows(values: torch.Tensor, plan: Plan, rank: int, fill: int = IGNORE) -> torch.Tensor:
    """Return the rows of `[S, ...]` that a rank holds, `fill` past the end."""
    padded = values.new_full((plan.padded_length, *values.shape[1:]), fill)
    padded[: len(values)] = values
    return padded[torch.from_numpy(plan.shards.rows(rank))]


def _whole(subject: Subject, share: ShardedBatch, logits: torch.Tensor) -> torch.Tensor:
    """Return `[S, vocab]`; a shard of the user's own may have padded the row at its end."""
    return share.unshard(logits).flatten(0, -2)[: subject.row.length].cpu()


def read_outputs(outputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits `[1, L, vocab]` and the loss of whatever a model returned.

    Raises:
        UnsupportedError: there are no logits.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs, None
    if isinstance(outputs, Mapping) or hasattr(outputs, "logits"):
        get = outputs.get if isinstance(outputs, Mapping) else vars(outputs).get
        logits, loss = get("logits"), get("loss")
    else:
        tensors = [x for x in outputs if isinstance(x, torch.Tensor)]
        logits = next((x for x in tensors if x.dim() > 1), None)
        loss = next((x for x in tensors if x.dim() == 0), None)
    if logits is None:
        raise UnsupportedError(
            f"the model returned {type(outputs).__name__} without logits [1, L, vocab], which "
            "every check compares: turn off a fused loss, or return logits too"
        )
    return logits, loss


def take_gradients(model: Model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run backward and return the gradients, leaving none behind."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    gradients = _gradients(model)
    model.zero_grad(set_to_none=True)
    return gradients


def sum_gradients(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Add the ranks' gradients, in fp64; a parameter may have none on some."""
    total: dict[str, torch.Tensor] = {}
    for gradients in ranks:
        for name, grad in gradients.items():
            total[name] = total[name] + grad if name in total else grad.double()
    return total


def _gradients(model: Model) -> dict[str, torch.Tensor]:
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: grad.to("cpu", copy=True) for name, grad in grads.items()}
