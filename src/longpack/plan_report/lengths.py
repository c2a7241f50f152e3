"""Document lengths from where they are: a file, a histogram, a corpus with a tokenizer, a run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longpack.bench.lengths import corpora, draw_lengths
from longpack.errors import RunError
from longpack.packing import PackedRow

if TYPE_CHECKING:
    from longpack.train.config import DataSection

ROW_TOKENS = 131_072
HISTOGRAM_DRAWS = 200_000  # documents drawn from a histogram of one's own


@dataclass(frozen=True)
class Documents:
    """Document lengths, and what their source says about rows.

    Args:
        lengths: tokens of the documents.
        row_tokens: rows of a packed row, if the source says.
        ranks: cp ranks, if the source is a run file.
        is_row: whether the lengths are one row already, in its order.
    """

    lengths: list[int]
    row_tokens: int | None = None
    ranks: int | None = None
    is_row: bool = False

    def rows(
        self, row_tokens: int | None, count: int, seed: int = 0, longest_tokens: int | None = None
    ) -> list[PackedRow]:
        """Return packed rows; see `pack_rows`."""
        if self.is_row:
            return [PackedRow.from_lengths(self.lengths)]
        tokens = row_tokens or self.row_tokens or ROW_TOKENS
        return pack_rows(self.lengths, tokens, count, seed, longest_tokens)


def load_documents(
    source: str, tokenizer: str | None = None, text_field: str = "text", seed: int = 0
) -> Documents:
    """Return the document lengths of whatever `source` names.

    Args:
        source: lengths separated by commas (one row, in this order), the name of a corpus that
            longpack carries, a file of lengths, a run file, or with a tokenizer a corpus.
        tokenizer, text_field: as in `corpus_lengths`.
        seed: of draws from histograms.

    Raises:
        RunError: the source is none of these.
    """
    if source.replace(",", "").isdigit():
        return Documents([int(n) for n in source.split(",") if n], is_row=True)
    if tokenizer is not None:
        return Documents(corpus_lengths([source], tokenizer, text_field))
    if source in corpora():
        return Documents(named_lengths(source, HISTOGRAM_DRAWS, seed))
    if source.endswith(".toml"):
        return Documents(*run_file_lengths(source))
    if Path(source).exists():
        return Documents(file_lengths(source, seed))
    raise RunError(
        f"{source!r} is neither lengths like 4096,1000 nor a file nor one of {', '.join(corpora())}"
    )


def named_lengths(corpus: str, count: int, seed: int = 0) -> list[int]:
    """Draw lengths of a corpus that longpack carries, one of `longpack.bench.lengths.corpora()`."""
    if corpus not in corpora():
        raise RunError(f"corpus {corpus!r} is not one of {', '.join(corpora())}")
    return draw_lengths(corpus, count, seed)


def file_lengths(path: Path | str, seed: int = 0) -> list[int]:
    """Read lengths from a file.

    `.json` holds a list of lengths, or a histogram `{"bins": [[low, high], ...], "weights":
    [...]}` with both ends included, from which lengths are drawn uniformly inside bins; any other
    file holds integers separated by white space or commas.

    Raises:
        RunError: the file is not there, or does not hold that.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".json":
            content = json.loads(text)
            lengths = _draw(content, seed) if isinstance(content, dict) else list(content)
        else:
            lengths = text.replace(",", " ").split()
        found = [int(n) for n in lengths]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} does not hold document lengths ({type(error).__name__}: {error}): give "
            "integers, a JSON list of them, or a JSON object with bins and weights"
        ) from error
    if not found or min(found) < 0:
        raise RunError(f"{path} holds {len(found)} lengths, the least {min(found, default=None)}")
    return found


def _draw(histogram: dict[str, Any], seed: int) -> list[int]:
    bins, weights = np.array(histogram["bins"]), np.array(histogram["weights"], dtype=float)
    random = np.random.default_rng(seed)
    chosen = bins[random.choice(len(bins), size=HISTOGRAM_DRAWS, p=weights / weights.sum())]
    return random.integers(chosen[:, 0], chosen[:, 1] + 1).tolist()


def corpus_lengths(
    paths: Sequence[Path | str], tokenizer: str = "bytes", text_field: str = "text"
) -> list[int]:
    """Tokenize text, `.jsonl` or `.parquet` files and return each document's tokens.

    Args:
        paths: files, and folders of text files.
        tokenizer: as in a run file: `bytes`, `smollm2`, or the path of a saved one.
        text_field: JSON field or Parquet column that holds the text.
    """
    from longpack.train.config import DataSection

    data = DataSection(
        paths=[Path(p) for p in paths], tokenizer=tokenizer, text_field=text_field, row_length=2
    )
    return _tokenized(data)


def run_file_lengths(path: Path | str) -> tuple[list[int], int, int]:
    """Return a run file's document lengths, its row length in tokens, and its cp ranks."""
    from longpack.train import load_config

    config = load_config(path)
    longest = config.data.document_length or config.data.row_length
    lengths = [min(n, longest) for n in _tokenized(config.data)]
    return lengths, config.data.row_length, config.parallel.cp


def _tokenized(data: "DataSection") -> list[int]:
    from longpack.train.documents import read_corpus
    from longpack.train.tokenizer import load_tokenizer

    corpus, tokenizer = read_corpus(data), load_tokenizer(data.tokenizer)
    return [len(tokenizer.encode(corpus.text(i))) + 1 for i in range(len(corpus))]  # and eos


def pack_rows(
    lengths: Sequence[int],
    row_tokens: int,
    rows: int,
    seed: int = 0,
    longest_tokens: int | None = None,
) -> list[PackedRow]:
    """Pack shuffled documents into full rows, the last document of each cut at the row's end.

    Each row is filled from a shuffle of its own, repeated when the documents do not fill it.

    Args:
        lengths: tokens of the documents.
        row_tokens: rows of a pack.
        rows: packs.
        seed: of the shuffles.
        longest_tokens: longer documents are cut off there, at `row_tokens` by default.
    """
    sizes = np.minimum(np.array(lengths, dtype=np.int64), longest_tokens or row_tokens)
    if sizes.sum() <= 0:
        raise RunError("the documents hold no token: there is nothing to pack")
    packed = []
    for number in range(rows):
        random = np.random.default_rng((seed, number))
        rounds = -(-row_tokens // int(sizes.sum()))
        drawn = np.concatenate([random.permutation(sizes) for _ in range(rounds)])
        stops = np.cumsum(drawn)
        kept = drawn[: int(np.searchsorted(stops, row_tokens)) + 1].copy()
        kept[-1] -= kept.sum() - row_tokens
        packed.append(PackedRow.from_lengths(kept))
    return packed
