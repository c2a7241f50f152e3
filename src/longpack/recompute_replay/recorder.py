"""The log of one checkpointed call."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Generic, TypeVar

from longpack.errors import ReplayError
from longpack.recompute_replay.accounting import Ledger
from longpack.recompute_replay.codecs import Codec
from longpack.recompute_replay.miss import place
from longpack.recompute_replay.outside import RandomState
from longpack.recompute_replay.values import detached, fingerprint, nbytes

T = TypeVar("T")


@dataclass(slots=True)
class Note:
    """What the log knows about one record besides its value."""

    record_id: int
    fingerprint: Any
    site: str = ""
    codec: Codec | None = None
    random: RandomState | None = None  # where the random streams stood after the decision
    inputs: Any = None  # a copy, in verify mode


class RecomputeReplayRecorder(Generic[T]):
    """Ordered log of one checkpointed call's forward decisions, consumed on recompute.

    A frame is recomputed once a backward: never, once, or many times, perhaps inside itself.
    Each recompute reads from its own position, kept by thread; a `scope` in replay mode rewinds
    when it is entered. The records of checkpointed calls made inside this one hang below it, so
    that a nested call finds its log when the outer call is recomputed.
    """

    def __init__(self) -> None:
        self._records: list[T] = []
        self._notes: list[Note] = []
        self._children: list[RecomputeReplayRecorder[T]] = []
        self._positions: dict[int, tuple[int, int]] = {}  # thread -> next record, next child
        self._forwards_open = 0
        self._held: list[tuple[str, int]] = []  # bytes by site, as counted in the ledger
        self._ledger: Ledger | None = None
        self.name = ""
        self.labels: Mapping[str, Any] = {}
        self.has_collective = False
        self.replay_misses = 0

    @property
    def records(self) -> tuple[T, ...]:
        """The recorded decisions in forward order."""
        return tuple(self.read(at)[0] for at in range(len(self._records)))

    @property
    def sites(self) -> tuple[str, ...]:
        """The site names of the records in forward order; empty where none was given."""
        return tuple(note.site for note in self._notes)

    @property
    def is_empty(self) -> bool:
        """True when neither this call nor a call inside it has recorded anything to replay."""
        return not self._records and not self._children

    @property
    def is_partial(self) -> bool:
        """True while the forward that writes this log still runs."""
        return self._forwards_open > 0

    @property
    def _cursor(self) -> int:
        return self._position[0]

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        self._position = (value, self._position[1])

    @property
    def _position(self) -> tuple[int, int]:
        return self._positions.get(get_ident(), (0, 0))

    @_position.setter
    def _position(self, value: tuple[int, int]) -> None:
        self._positions[get_ident()] = value

    def __len__(self) -> int:
        return len(self._records)

    def record(self, entry: T) -> None:
        """Append one forward decision, detached from its gradient graph."""
        self.append(entry)

    def append(
        self,
        entry: T,
        site: str = "",
        codec: Codec | None = None,
        random: RandomState | None = None,
        inputs: Any = None,
        collective: bool = False,
    ) -> T:
        """Append one decision with what is known about it; return it detached."""
        self.has_collective |= collective
        entry = detached(entry)
        stored = entry if codec is None else codec.encode(entry)
        self._records.append(stored)
        self._notes.append(Note(id(stored), fingerprint(stored), site, codec, random, inputs))
        return entry

    def open(self) -> None:
        """Note that a forward writes this log now."""
        self._forwards_open += 1

    def close(self) -> None:
        """Note that the forward has ended, and count the bytes that it recorded."""
        self._forwards_open -= 1
        if self._notes:
            self._count_bytes()

    def rewind(self) -> None:
        """Restart replay from the first record."""
        self._positions.pop(get_ident(), None)

    def take(self) -> T | None:
        """Return the next recorded decision, or `None` when replay outruns the log.

        Raises:
            ReplayError: when the record was changed in place after it was recorded.
        """
        at, child = self._position
        if at >= len(self._records):
            self.replay_misses += 1
            return None
        self._position = (at + 1, child)
        return self.read(at)[0]

    def take_child(self) -> "RecomputeReplayRecorder[T] | None":
        """Return the log of the next checkpointed call inside this one, or None past the last."""
        at, child = self._position
        if child >= len(self._children):
            return None
        self._position = (at, child + 1)
        return self._children[child]

    def seal(self) -> None:
        """Accept the records as they are now: the changes of `on_record_exit` are meant."""
        for note, stored in zip(self._notes, self._records, strict=False):
            note.record_id, note.fingerprint = id(stored), fingerprint(stored)
        self._count_bytes()

    def _count_bytes(self) -> None:
        if self._ledger is None:
            return
        held = [
            (note.site, nbytes(stored) + (0 if note.random is None else note.random.nbytes))
            for note, stored in zip(self._notes, self._records, strict=False)
        ]
        self._ledger.replace(self._held, held)
        self._held = held

    def read(self, at: int) -> tuple[T, Note | None]:
        """Return record `at` and its note; no note where the record was put there by hand.

        Raises:
            ReplayError: when the record was changed in place after it was recorded.
        """
        stored = self._records[at]
        note = self._notes[at] if at < len(self._notes) else None
        if note is None or note.record_id != id(stored):
            return stored, None
        if note.fingerprint != fingerprint(stored):
            raise ReplayError(
                f"{place(self.name, note.site, self.labels)}: record {at}, a "
                f"{type(stored).__name__}, was changed in place after it was recorded, so the "
                "recompute would not see what the forward saw; change a copy of it instead"
            )
        return stored if note.codec is None else note.codec.decode(stored), note

    def __del__(self) -> None:
        if self._ledger is not None and self._held:
            self._ledger.replace(self._held, [])
