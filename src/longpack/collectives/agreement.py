"""Ranks tell each other what they are about to do, before they do it."""

from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from longpack.collectives.transport import Transport

T = TypeVar("T")

# How often each rank of this process has met the others, by group; an entry goes with its group.
_MET: "WeakKeyDictionary[object, dict[int, int]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Vote(Generic[T]):
    """What one rank is about to do, or why it cannot."""

    value: T | None
    failure: str | None


def count_meeting(transport: Transport) -> int:
    """Return how often this rank has met the others of its axis, this time included."""
    met = _MET.setdefault(transport.group, {})
    met[transport.rank] = met.get(transport.rank, 0) + 1
    return met[transport.rank]


def are_equal(transport: Transport, digest: bytes) -> bool:
    """Say whether all ranks pass the same digest, 12 bytes; one small exchange on the host."""
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    theirs = transport.all_gather(mine).view(transport.world_size, -1)
    return bool((theirs == mine).all())


def collect_votes(transport: Transport, value: T | None, failure: str | None) -> list[Vote[T]]:
    """Return every rank's vote, in rank order."""
    return transport.all_gather_object(Vote(value, failure))
