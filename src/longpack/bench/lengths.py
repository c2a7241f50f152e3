"""Document lengths of real corpora, and packed rows made of them.

`data/lengths.json` holds lengths measured on corpora, frozen so that results can be compared, and
histograms that others have published, each with its source.
"""

import functools
import json
from importlib import resources
from typing import Any

import numpy as np

from longpack.packing import PackedRow


def corpora() -> tuple[str, ...]:
    """Name the corpora that `draw_lengths` knows."""
    data = _data()
    return (*data["measured"], *data["histograms"])


def source(corpus: str) -> str:
    """Say where the lengths of a corpus come from."""
    data = _data()
    return {**data["measured"], **data["histograms"]}[corpus]["source"]


def draw_lengths(corpus: str, count: int, seed: int) -> list[int]:
    """Draw document lengths in tokens, the same for one seed on every machine.

    Measured lengths are shuffled and repeated as needed; from a histogram a bin is drawn by
    weight, then a length log-uniformly inside it.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    data = _data()
    if corpus in data["measured"]:
        lengths = np.array(data["measured"][corpus]["lengths"])
        rounds = [random.permutation(lengths) for _ in range(-(-count // len(lengths)))]
        return np.concatenate(rounds)[:count].tolist()
    histogram = data["histograms"][corpus]
    bins, weights = np.array(histogram["bins"]), np.array(histogram["weights"], dtype=float)
    chosen = bins[random.choice(len(bins), size=count, p=weights / weights.sum())]
    low, high = np.log(np.maximum(chosen[:, 0], 1)), np.log(chosen[:, 1] + 1)
    return np.floor(np.exp(low + random.random(count) * (high - low))).astype(int).tolist()


def pack_row(corpus: str, tokens: int, seed: int, longest: int | None = None) -> PackedRow:
    """Fill a row of `tokens` with drawn documents, the last one cut at the row's end.

    Args:
        corpus: one of `corpora()`.
        tokens: rows of the packed row.
        seed: picks the documents.
        longest: longer documents are cut into pieces of this many tokens, `tokens` by default.
    """
    limit, count = longest or tokens, 1024
    while True:
        pieces: list[int] = []
        for length in draw_lengths(corpus, count, seed):
            whole, rest = divmod(length, limit)
            pieces += [limit] * whole + ([rest] if rest else [])
        stops = np.cumsum(pieces)
        if stops[-1] >= tokens:
            break
        count *= 2
    kept = pieces[: int(np.searchsorted(stops, tokens)) + 1]
    kept[-1] -= sum(kept) - tokens
    return PackedRow.from_lengths(kept)


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("longpack.bench").joinpath("data/lengths.json").read_text("utf-8")
    return json.loads(text)
