"""Verify a model: every check of the table, one report."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longpack.blockdiag_cp import ShardedBatch, state
from longpack.collectives import Loopback, Transport, as_transport
from longpack.errors import UnsupportedError
from longpack.verify.batches import Batch, random_batch, text_batch
from longpack.verify.checks import CHECKS
from longpack.verify.models import Loaded, load_model, vocabulary
from longpack.verify.report import CheckResult, Report
from longpack.verify.runs import JoinedRanks, RunFailedError
from longpack.verify.subject import Ranks, Settings, Subject

CHECKPOINTING = ("full", "reentrant", "as_is")


def verify_model(
    model: Any,
    batch: Batch | Callable[[int, int], Batch] | None = None,
    *,
    world_size: int = 2,
    layout: str = "contiguous",
    kv_exchange: str | None = None,
    attn_backend: str | None = None,
    checkpointing: str = "full",
    dtype: torch.dtype | None = None,
    shard: Callable[[Batch, Transport], ShardedBatch] | None = None,
    forward: Callable[[torch.nn.Module, ShardedBatch], Any] | None = None,
    corpus: Sequence[Path] = (),
    text_row: int | None = None,
    cp_mesh: Any = None,
    device: torch.device | str = "cpu",
    only: Sequence[str] = (),
    timeout_s: float = 60.0,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """Prove context parallelism on a model and data, or name what is wrong.

    Args:
        model: see `longpack.verify.load_model`. It is copied, never run itself.
        batch: as for `shard_batch`, with labels; or a function from (rank, world_size), what each
            rank's loader gives. By default documents of `corpus`, of the standard library where
            the model has a tokenizer, or of random tokens.
        world_size: ranks of the cp axis, threads of this process.
        layout, kv_exchange, attn_backend: as for `shard_batch`.
        checkpointing: `full` and `reentrant` turn it on for the recompute check; `as_is` leaves
            the model's own.
        dtype: of parameters and computation; the model's own by default.
        shard: your own way from (batch, transport) to this rank's share.
        forward: your own call of the model: from (model, share), its outputs.
        corpus: text files whose beginnings are the documents.
        text_row: which row of `position_ids` `[R, B, S]` counts text, as for `shard_batch`.
        cp_mesh: the cp axis where ranks are processes; every rank then calls this alike, and
            `world_size` is not read.
        device: where the model's copies run. Ranks that are threads need the CPU: backward of all
            of them would share one thread of a GPU, and wait for itself.
        only: names of the checks to run; all by default.
        timeout_s: how long ranks that are threads wait for each other before that is a finding;
            processes wait as long as their group's timeout.
        tell: called with the name of each check before it runs.

    Returns:
        The report, the same on every rank.

    Raises:
        RunError: there is no such model, or no tokens can be made for it.
        UnsupportedError: a batch without labels, an unknown check or checkpointing mode.
        PackingError, PlanError: the batch or the layout cannot be read.
    """
    _accept("checkpointing", checkpointing, CHECKPOINTING)
    for name in only:
        _accept("only", name, tuple(CHECKS))
    loaded = load_model(model, dtype)
    ranks: Ranks = (
        Loopback(world_size, timeout_s)
        if cp_mesh is None
        else JoinedRanks(as_transport(cp_mesh), torch.device(device))
    )
    knobs = state.cp_varlen_runtime_config()
    settings = Settings(
        world_size=ranks.world_size,
        layout=layout,
        kv_exchange=state.normalize_kv_exchange(kv_exchange or knobs["kv_exchange"]),
        attn_backend=state.normalize_attn_backend(attn_backend or knobs["attn_backend"]),
        checkpointing=checkpointing,
        dtype=dtype or next(p.dtype for p in loaded.model.parameters() if p.is_floating_point()),
        device=torch.device(device),
        text_row=text_row,
    )
    load, about = _loader(batch, loaded, corpus)
    subject = Subject(loaded.model, load, settings, ranks, shard, forward)
    plan, targets = subject.plan, subject.targets  # misuse shows here, before anything runs
    about = f"{loaded.about}, {about}: {plan.row}, {int((targets >= 0).sum())} targets"
    chosen = {name: check for name, check in CHECKS.items() if not only or name in only}
    results = _run(subject, chosen, tell)
    shown = {k: v for k, v in dataclasses.asdict(settings).items() if v is not None}
    shown["dtype"] = str(settings.dtype).removeprefix("torch.")
    shown["device"] = str(settings.device)
    return Report(about, shown, loaded.notes + _notes(subject), results)


def _run(
    subject: Subject, checks: Mapping[str, Any], tell: Callable[[str], None]
) -> tuple[CheckResult, ...]:
    """Run the checks; one that cannot run gives the reason as a finding, once."""
    results: list[CheckResult] = []
    for name, check in checks.items():
        tell(name)
        apart = {found.kind for r in results for found in r.findings} & {"agreement", "hang"}
        parted = isinstance(subject.ranks, JoinedRanks) and subject.ranks.parted
        if apart or parted:  # the next run would wait for ranks that do not come
            result = CheckResult("not run: ranks do not do the same", ran=False)
        else:
            try:
                result = check(subject)
            except RunFailedError as failed:
                known = {found.kind for r in results if not r.ran for found in r.findings}
                fresh = () if failed.finding.kind in known else (failed.finding,)
                result = CheckResult(f"not run: {failed.finding.fact}", fresh, ran=False)
        results.append(dataclasses.replace(result, name=name))
    return tuple(results)


def _loader(
    batch: Batch | Callable[[int, int], Batch] | None, loaded: Loaded, corpus: Sequence[Path]
) -> tuple[Callable[[int, int], Batch], str]:
    if isinstance(batch, Mapping):
        return (lambda rank, world_size: batch), "the given batch"
    if batch is not None:
        return batch, "the batches that ranks load"
    if loaded.encode is not None or corpus:
        size = vocabulary(loaded.model)
        encode = loaded.encode or (lambda text: [byte % size for byte in text.encode()])
        made, about = text_batch(encode, corpus), "real documents"
    else:
        made, about = random_batch(vocabulary(loaded.model)), "documents of random tokens"
    return (lambda rank, world_size: made), about


def _notes(subject: Subject) -> tuple[str, ...]:
    dropout = [m for m in subject.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
    return (f"{len(dropout)} dropout layers set to 0",) if dropout else ()


def _accept(argument: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise UnsupportedError(f"{argument}={value!r} is not one of {', '.join(accepted)}")
