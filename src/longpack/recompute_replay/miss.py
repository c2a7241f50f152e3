"""What to do when a recompute asks for a decision that its forward did not record."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

_NO_LABELS: Mapping[str, Any] = MappingProxyType({})
_LABELS: ContextVar[Mapping[str, Any]] = ContextVar("longpack_replay_labels", default=_NO_LABELS)


@dataclass(frozen=True)
class AgreeOnMiss:
    """Let ranks vote at every replayed decision: if one has no record, all decide again.

    Arguments:
        any_rank: takes "this rank has no record" and returns whether any rank has none. It is a
            collective: every rank must reach every decision of the channel in the same order,
            which takes `early_stop=False` where ranks save different tensors.
    """

    any_rank: Callable[[bool], bool]


MissPolicy = Literal["raise", "recompute"] | AgreeOnMiss


@contextmanager
def replay_labels(**labels: Any) -> Iterator[None]:
    """Name the checkpointed calls made inside, for messages: `layer=3, microbatch=0, rank=1`.

    Labels of an outer block stay, and `rank` is read from the environment variable RANK where it
    is not given.
    """
    token = _LABELS.set({**current_labels(), **labels})
    try:
        yield
    finally:
        _LABELS.reset(token)


def current_labels() -> Mapping[str, Any]:
    """Return the labels that hold here."""
    return _LABELS.get()


def place(channel: str, site: str, labels: Mapping[str, Any]) -> str:
    """Return the words for where a decision is made."""
    rank = {"rank": os.environ["RANK"]} if "RANK" in os.environ else {}
    known = {**rank, **labels}
    tail = f" ({', '.join(f'{key} {value}' for key, value in known.items())})" if known else ""
    return f"channel {channel!r}{f', site {site!r}' if site else ''}{tail}"
