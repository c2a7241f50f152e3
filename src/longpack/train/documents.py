"""From files to documents: which there are, in what order, and which are not usable."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from longpack.errors import RunError
from longpack.train.config import DataSection


class Source(Protocol):
    """The documents of one file, read one at a time by number."""

    @property
    def path(self) -> Path: ...

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return what an error calls the document."""
        ...

    def text(self, index: int) -> str:
        """Return the document.

        Raises:
            BadDocumentError: it is not UTF-8, or not the text that was asked for.
        """
        ...


class BadDocumentError(ValueError):
    """A document that cannot be trained on; the message says why."""


@dataclass(frozen=True)
class TextFile:
    """A file that is one document."""

    path: Path

    def __len__(self) -> int:
        return 1

    def name(self, index: int) -> str:
        return str(self.path)

    def text(self, index: int) -> str:
        try:
            return _utf8(self.path.read_bytes())
        except OSError as error:
            raise BadDocumentError(f"cannot be read: {error.strerror}") from None


class JsonLines:
    """A `.jsonl` file: each line that is not blank is one document."""

    def __init__(self, path: Path, field: str) -> None:
        self.path, self._field = path, field
        starts, at = [], 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    starts.append(at)
                at += len(line)
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts)

    def name(self, index: int) -> str:
        return f"{self.path}, record {index + 1}"

    def text(self, index: int) -> str:
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            line = _utf8(file.readline())
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadDocumentError(f"is not JSON: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get(self._field), str):
            raise BadDocumentError(f"has no text field {self._field!r} (data.text_field)")
        return record[self._field]


class Parquet:
    """A `.parquet` file: each row is one document."""

    def __init__(self, path: Path, column: str) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path = path
        try:
            names = pyarrow.parquet.read_schema(path).names
            if column not in names:
                raise RunError(
                    f"{path} has no column {column!r} (data.text_field); it has {', '.join(names)}"
                )
            table = pyarrow.parquet.read_table(path, columns=[column], memory_map=True)
        except pyarrow.ArrowInvalid as error:
            raise RunError(f"{path} is not a Parquet file: {error}") from None
        self._column = table.column(column)

    def __len__(self) -> int:
        return len(self._column)

    def name(self, index: int) -> str:
        return f"{self.path}, row {index}"

    def text(self, index: int) -> str:
        value = self._column[index].as_py()
        if not isinstance(value, str):
            raise BadDocumentError(f"is {type(value).__name__}, not text (data.text_field)")
        return value


@dataclass(frozen=True)
class Corpus:
    """Every usable document of a run.

    Args:
        documents: where each is, as (source, number in it).
        skipped: why each unusable document is left out, by its name.
        fingerprint: a hash of all texts and their order, the same wherever the files lie.
    """

    documents: tuple[tuple[Source, int], ...]
    skipped: dict[str, str]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.documents)

    def text(self, index: int) -> str:
        """Return one document."""
        source, number = self.documents[index]
        return source.text(number)

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order of documents in one pass, a function of seed and epoch alone."""
        return np.random.default_rng((seed, epoch)).permutation(len(self))


def read_corpus(data: DataSection) -> Corpus:
    """Find the documents and read each once, so that bad ones are known before the run begins.

    Raises:
        RunError: a path that does not exist or holds no file, no usable document, or, with
            `on_bad_file = "refuse"`, any document that is empty or not UTF-8.
    """
    usable, skipped, digest = [], {}, hashlib.sha256()
    for source in _sources(data):
        if not len(source):
            skipped[str(source.path)] = "is empty"
        for number in range(len(source)):
            try:
                content = _content(source, number)
            except BadDocumentError as bad:
                skipped[source.name(number)] = str(bad)
                continue
            usable.append((source, number))
            digest.update(len(content).to_bytes(8, "little") + content)
    _judge(data, len(usable), skipped)
    return Corpus(tuple(usable), skipped, digest.hexdigest()[:16])


def _content(source: Source, number: int) -> bytes:
    """Return a document's bytes, or say why it cannot be trained on."""
    text = source.text(number)
    if not text.strip():
        raise BadDocumentError("is empty")
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise BadDocumentError(f"is not UTF-8: {error.reason} at {error.start}") from None


def _judge(data: DataSection, usable: int, skipped: dict[str, str]) -> None:
    named = "; ".join(f"{name} {why}" for name, why in list(skipped.items())[:5])
    more = f"; and {len(skipped) - 5} more" if len(skipped) > 5 else ""
    if skipped and data.on_bad_file == "refuse":
        raise RunError(
            f"{len(skipped)} of {usable + len(skipped)} documents cannot be used: {named}{more}. "
            'Mend or remove them, or set data.on_bad_file = "skip"'
        )
    if not usable:
        raise RunError(f"data.paths hold no usable document: {named or 'no file'}{more}")


def _sources(data: DataSection) -> Iterator[Source]:
    for path in data.paths:
        if not path.exists():
            raise RunError(f"data.paths: {path} does not exist")
        if path.is_dir():
            yield from _folder(path, data)
        elif path.suffix == ".jsonl":
            yield JsonLines(path, data.text_field)
        elif path.suffix == ".parquet":
            yield Parquet(path, data.text_field)
        else:
            yield TextFile(path)


def _folder(folder: Path, data: DataSection) -> Iterator[Source]:
    """Yield a folder's files, sorted by path so that every machine agrees on their order."""
    found = False
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - set(data.exclude))
        for name in sorted(files):
            if name.endswith(data.suffix):
                found = True
                yield TextFile(Path(here, name))
    if not found:
        raise RunError(
            f"data.paths: folder {folder} holds no file that ends in {data.suffix!r} (data.suffix)"
        )


def _utf8(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocumentError(
            f"is not UTF-8: byte {content[error.start]:#04x} at offset {error.start}"
        ) from None
