"""Everything of a run that can fail, done before ranks do anything together."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longpack.train.checkpoint import check_folder, fingerprint
from longpack.train.config import RunConfig
from longpack.train.documents import Corpus, read_corpus
from longpack.train.model import build_model, longest_document
from longpack.train.rows import RowPacker
from longpack.train.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Prepared:
    """What a run file leads to, on the CPU of one rank.

    Args:
        config: the run file.
        corpus: its documents.
        tokenizer: its tokenizer.
        model: its model, before any checkpoint.
    """

    config: RunConfig
    corpus: Corpus
    tokenizer: Tokenizer
    model: Any

    @cached_property
    def document_length(self) -> int:
        """Longest piece of a document, in tokens."""
        data = self.config.data
        return data.document_length or longest_document(self.model, data.row_length)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What the run's losses depend on."""
        return fingerprint(self.config, self.corpus.fingerprint, self.document_length)

    @property
    def agreement(self) -> str:
        """What every rank must have alike: the fingerprint and the mesh, in one line."""
        parallel = self.config.parallel.model_dump()
        return json.dumps({**self.fingerprint, "parallel": parallel}, sort_keys=True)

    def packer(self) -> RowPacker:
        """Return the maker of rows."""
        return RowPacker(
            corpus=self.corpus,
            tokenizer=self.tokenizer,
            row_length=self.config.data.row_length,
            document_length=self.document_length,
            seed=self.config.run.seed,
        )

    def about(self) -> str:
        """Describe the run in one line."""
        p, size = self.config.parallel, sum(x.numel() for x in self.model.parameters())
        skipped = f" ({len(self.corpus.skipped)} skipped)" if self.corpus.skipped else ""
        device = next(self.model.parameters()).device.type
        return (
            f"{len(self.corpus)} documents{skipped}, {self.config.data.row_length:,} tokens a row; "
            f"{type(self.model).__name__}, {size:,} parameters; cp {p.cp} x dp {p.dp} "
            f"on {device}, {p.layout}, {p.kv_exchange}, {p.attn_backend}"
            f"{', FSDP2' if p.fsdp else ''}"
        )


def prepare(config: RunConfig) -> Prepared:
    """Read documents, build tokenizer and model, look at the folder. Writes nothing.

    Raises:
        LongpackError: something of it is not usable; says what and how to mend it.
    """
    corpus = read_corpus(config.data)
    tokenizer = load_tokenizer(config.data.tokenizer)
    prepared = Prepared(config, corpus, tokenizer, build_model(config, tokenizer))
    check_folder(config.run.folder, prepared.fingerprint, config.run.resume)
    return prepared
