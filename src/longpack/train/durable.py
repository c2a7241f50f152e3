"""Files that a crash or a power loss leaves old or new, and that are checked when read.

A file is written under another name, brought to the disk, renamed, and the rename brought to the
disk. Digests find damage, not malice: whoever can write a folder can write digests that match.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longpack.errors import RunError


def write_file(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old content or the new.

    Raises:
        RunError: it cannot be written, for want of space say; the old content is there.
    """
    partial = path.with_name(f"{path.name}.partial")
    with writing(path), partial.open("w", encoding="utf-8") as file:
        file.write(text)
        sync_file(file)
    with writing(path):
        os.replace(partial, path)
        sync_folder(path.parent)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON as `write_file` does."""
    write_file(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Args:
        path: the file.
        remedy: ends the message.

    Raises:
        RunError: it cannot be read, or is no JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}. {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged, it is not JSON: {error}. {remedy}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged, it is not a JSON object. {remedy}")
    return content


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_json(content: Any) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sync_file(file: Any) -> None:
    """Bring what was written to an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an operating system's error into a `RunError` that names what was written."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error.strerror or str(error)) from None


def unwritable(path: Path, reason: str) -> RunError:
    """Return the error that a path cannot be written, with the space there and the remedy."""
    free = shutil.disk_usage(next(p for p in path.parents if p.exists())).free
    return RunError(
        f"{path} cannot be written: {reason} ({free >> 20:,} MiB are free there). The last whole "
        "checkpoint is kept: make room, or make run.folder writable, and start the same command "
        "again"
    )
