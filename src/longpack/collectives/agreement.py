"""Ranks tell each other what they are about to do, before they do it."""

from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from longpack.collectives.transport import Transport

T = TypeVar("T")

# Which ranks of this process have compared plans once, by group; an entry goes with its group.
_MET: "WeakKeyDictionary[object, set[int]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Vote(Generic[T]):
    """What one rank is about to do, or why it cannot."""

    value: T | None
    failure: str | None


def first_meeting(transport: Transport) -> bool:
    """Say whether this rank has not met the others of its axis yet, and remember that it has."""
    met = _MET.setdefault(transport.group, set())
    fresh = transport.rank not in met
    met.add(transport.rank)
    return fresh


def collect_votes(transport: Transport, value: T | None, failure: str | None) -> list[Vote[T]]:
    """Return every rank's vote, in rank order."""
    return transport.all_gather_object(Vote(value, failure))
