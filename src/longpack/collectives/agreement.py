"""Ranks tell each other what they are about to do, before they do it."""

from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakSet

from longpack.collectives.transport import Transport

T = TypeVar("T")

# Groups whose ranks have compared plans once; membership goes with the group.
_MET: "WeakSet[object]" = WeakSet()


@dataclass(frozen=True)
class Vote(Generic[T]):
    """What one rank is about to do, or why it cannot."""

    value: T | None
    failure: str | None


def first_meeting(transport: Transport) -> bool:
    """Say whether this axis has not met yet, and remember that it has."""
    fresh = transport.group not in _MET
    if fresh:
        _MET.add(transport.group)
    return fresh


def collect_votes(transport: Transport, value: T | None, failure: str | None) -> list[Vote[T]]:
    """Return every rank's vote, in rank order."""
    return transport.all_gather_object(Vote(value, failure))
