"""Checkpoints: complete or not there, and only of the run that the folder belongs to.

    folder/run.json                        what the run is (its fingerprint)
    folder/checkpoints/step-00000020/      torch.distributed.checkpoint, and progress.json

A checkpoint is written under another name, brought to the disk and renamed when it is whole, so
that a kill or power loss at any moment leaves the last good one. All ranks see one file system.

`progress.json` holds a digest of itself and of every other file, so damage is found before
anything is loaded. Digests do not prove who wrote a checkpoint; one from elsewhere is read as
data (see `data_only.py`), so the worst that it can hold is wrong numbers.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from longpack.errors import RunError
from longpack.train.config import RunConfig
from longpack.train.data_only import load_as_data
from longpack.train.durable import (
    digest,
    digest_json,
    read_json,
    sync_folder,
    unwritable,
    write_json,
    writing,
)
from longpack.train.ranks import gather
from longpack.train.rows import Cursor


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Random numbers need no state: those of a step are a function of seed, step and rank.

    Args:
        step: optimizer steps done.
        cursor: where the next row begins.
    """

    step: int
    cursor: Cursor


def fingerprint(config: RunConfig, corpus: str, document_length: int) -> dict[str, Any]:
    """Return what makes a run this run: all that its losses depend on.

    Not in it, so free to change on resume: `[parallel]`, gradient checkpointing, `run.steps`,
    `save_every`, `boundary_probe`, where files lie.

    Args:
        config: the run file.
        corpus: hash of the documents.
        document_length: as resolved with the model.
    """
    data = config.data
    return {
        "model": config.model.model_dump(mode="json", exclude={"gradient_checkpointing"}),
        "data": {
            "documents": corpus,
            "tokenizer": data.tokenizer,
            "row_length": data.row_length,
            "document_length": document_length,
        },
        "optimizer": config.optimizer.model_dump(mode="json"),
        "run": {"seed": config.run.seed, "rows_per_step": config.rows_per_step},
    }


def check_folder(folder: Path, identity: dict[str, Any], resume: bool) -> None:
    """Refuse a folder that holds something else than this run. Writes nothing.

    Raises:
        RunError: the folder holds another run (names what differs), a run although `resume` is
            False, or files that are no run.
    """
    if not folder.is_dir():
        if folder.exists():
            raise RunError(f"run.folder = {folder} is a file; name a folder")
        return
    record = folder / "run.json"
    if not record.is_file():
        if any(folder.iterdir()):
            raise RunError(
                f"run.folder = {folder} holds files but no run.json, so it is no run of longpack: "
                "name an empty or new folder"
            )
        return
    if not resume:
        raise RunError(
            f"run.folder = {folder} holds a run and run.resume = false: set it to true to go on, "
            "or name another folder"
        )
    remedy = "Restore it from a copy, or name another folder"
    differences = _differences(read_json(record, remedy), identity)
    if differences:
        raise RunError(
            f"run.folder = {folder} holds another run: {'; '.join(differences)}. Change these "
            "back to go on with it, or name another folder"
        )


def begin(folder: Path, identity: dict[str, Any]) -> None:
    """Claim the folder for this run; rank 0 calls it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", identity)


def save(folder: Path, progress: Progress, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Save model, optimizer and progress; earlier checkpoints go once this one is whole.

    Every rank calls it.

    Raises:
        RunError: on every rank, where one could not write; earlier checkpoints are kept.
    """
    checkpoints = folder / "checkpoints"
    partial, whole = checkpoints / ".partial", checkpoints / f"step-{progress.step:08d}"
    first = dist.get_rank() == 0

    def clear() -> None:
        if first:
            with writing(partial):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)

    def write_shards() -> dict[str, str]:
        try:
            save_shards(_state(model, optimizer), checkpoint_id=partial)
        except CheckpointException as error:
            raise unwritable(whole, _first_failure(error)) from None
        with writing(whole):
            own = partial.glob(f"__{dist.get_rank()}_*")
            return {path.name: digest(path) for path in own}

    def publish() -> None:
        if first:
            with writing(whole):
                files[".metadata"] = digest(partial / ".metadata")
                content = {**asdict(progress), "files": files}
                write_json(partial / "progress.json", {**content, "digest": digest_json(content)})
                partial.rename(whole)
                sync_folder(checkpoints)
            for older in _whole(folder)[:-1]:
                shutil.rmtree(older, ignore_errors=True)

    gather(clear, "save")
    files = {name: d for own in gather(write_shards, "save") for name, d in own.items()}
    gather(publish, "save")


def load(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> Progress | None:
    """Load the last whole checkpoint, also one of another number of ranks; None without one.

    Every rank calls it.

    Raises:
        RunError: on every rank, where a file is missing, damaged, or names code.
    """
    found = _whole(folder)
    if not found:
        return None
    last = found[-1]
    remedy = f"Restore {last} from a copy, or take it away to go on from what is left"
    progress = gather(lambda: _check(last, remedy), "load")[0]
    state = _state(model, optimizer)
    try:
        load_as_data(state, last)
    except CheckpointException as error:
        raise RunError(f"{last} cannot be loaded: {_first_failure(error)}. {remedy}") from None
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return progress


def _check(checkpoint: Path, remedy: str) -> Progress:
    """Return the progress of a checkpoint, having checked this rank's share of its files."""
    record = checkpoint / "progress.json"
    content = read_json(record, remedy)
    if content.pop("digest", None) != digest_json(content):
        raise RunError(f"{record} is damaged, its digest differs from its content. {remedy}")
    try:
        progress = Progress(content["step"], Cursor(**content["cursor"]))
        files = sorted(content["files"].items())
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{record} is damaged, its fields are others: {error}. {remedy}") from None
    for name, expected in files[dist.get_rank() :: dist.get_world_size()]:
        path = checkpoint / name
        try:
            actual = digest(path)
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}. {remedy}") from None
        if actual != expected:
            raise RunError(f"{path} is damaged, its digest is not the recorded one. {remedy}")
    return progress


def _first_failure(error: CheckpointException) -> str:
    rank, (first, _) = next(iter(error.failures.items()))
    what = (isinstance(first, OSError) and first.strerror) or str(first)
    return f"on rank {rank}: {what}"


def _whole(folder: Path) -> list[Path]:
    """Return the whole checkpoints, oldest first."""
    return sorted((folder / "checkpoints").glob("step-*"))


def _state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _differences(theirs: dict[str, Any], ours: dict[str, Any], at: str = "") -> list[str]:
    """Name every leaf in which two fingerprints differ."""
    found = []
    for name in sorted({*theirs, *ours}):
        a, b = theirs.get(name), ours.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{at}{name}.")
        elif a != b:
            found.append(f"{at}{name} was {a!r}, now {b!r}")
    return found
