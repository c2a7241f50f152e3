"""Checkpoints: complete or not there, and only of the run that the folder belongs to.

    folder/run.json                        what the run is (its fingerprint)
    folder/checkpoints/step-00000020/      torch.distributed.checkpoint, and progress.json

A checkpoint is written under another name and renamed when it is whole, so that a kill at any
moment leaves the last good one. All ranks see one file system.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from longpack.errors import RunError
from longpack.train.config import RunConfig
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
    differences = _differences(json.loads(record.read_text()), identity)
    if differences:
        raise RunError(
            f"run.folder = {folder} holds another run: {'; '.join(differences)}. Change these "
            "back to go on with it, or name another folder"
        )


def begin(folder: Path, identity: dict[str, Any]) -> None:
    """Claim the folder for this run; rank 0 calls it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "run.json", identity)


def save(folder: Path, progress: Progress, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Save model, optimizer and progress; earlier checkpoints go once this one is whole.

    Every rank calls it.
    """
    checkpoints = folder / "checkpoints"
    partial, whole = checkpoints / ".partial", checkpoints / f"step-{progress.step:08d}"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    save_shards(_state(model, optimizer), checkpoint_id=partial)
    if first:
        _write(partial / "progress.json", asdict(progress))
        partial.rename(whole)
        for older in _whole(folder)[:-1]:
            shutil.rmtree(older)
    dist.barrier()


def load(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> Progress | None:
    """Load the last whole checkpoint, also one of another number of ranks; None without one.

    Every rank calls it.
    """
    found = _whole(folder)
    if not found:
        return None
    state = _state(model, optimizer)
    load_shards(state, checkpoint_id=found[-1])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    progress = json.loads((found[-1] / "progress.json").read_text())
    return Progress(progress["step"], Cursor(**progress["cursor"]))


def _whole(folder: Path) -> list[Path]:
    """Return the whole checkpoints, oldest first."""
    return sorted((folder / "checkpoints").glob("step-*"))


def _state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that a kill leaves the old file or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)


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
