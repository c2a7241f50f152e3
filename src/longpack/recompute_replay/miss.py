"""What to do when a recompute asks for a decision that its forward did not record."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

NO_LABELS: Mapping[str, Any] = MappingProxyType({})
_LABELS: ContextVar[Mapping[str, Any]] = ContextVar("longpack_replay_labels", default=NO_LABELS)


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


def unbound(where: str) -> str:
    """Return the words for a recompute that has no log."""
    return (
        f"{where}: a decision was asked for in the recompute of a checkpoint that this channel is "
        "not bound to, so what its forward decided is lost; pass use_reentrant=False and "
        "context_fn=channel.checkpoint_context_fn(None) to checkpoint, or run under "
        'channel.scope(None, "replay") to decide again'
    )


def too_few(where: str, asked: int, sites: Sequence[str]) -> str:
    """Return the words for a recompute that decides more often than its forward did."""
    return (
        f"{where}: the recompute asked for decision {asked} and the forward recorded {len(sites)}"
        f"{_order(sites)}; the block decides more often in its recompute than in its forward; "
        'make both alike, or set on_miss="recompute" if no rank can be left alone in a collective'
    )


def out_of_order(where: str, at: int, asked: str, sites: Sequence[str]) -> str:
    """Return the words for a recompute that decides in another order than its forward did."""
    return (
        f"{where}: decision {at} of the recompute is site {asked!r} and in the forward it was "
        f"site {sites[at]!r}{_order(sites)}; the block decides in another order in its recompute; "
        "make both orders alike"
    )


def early_stopped(where: str) -> str:
    """Return the words for collective decisions in a block that early stop cuts."""
    return (
        f"{where}: the block decides by a collective and its recompute was cut by early stop, at "
        "the last tensor that this rank saved; a rank that saved fewer is cut earlier, perhaps "
        "before a collective that its peers run; pass early_stop=False to checkpoint"
    )


def _order(sites: Sequence[str]) -> str:
    named = [site or "unnamed" for site in sites]
    return f" (in order: {', '.join(named)})" if named else ""
