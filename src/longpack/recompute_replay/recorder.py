"""The log of one checkpointed call."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Generic, TypeVar

from longpack.errors import ReplayError
from longpack.recompute_replay.accounting import Held, Ledger
from longpack.recompute_replay.codecs import Codec
from longpack.recompute_replay.miss import NO_LABELS, place
from longpack.recompute_replay.outside import RandomState
from longpack.recompute_replay.values import detached, fingerprint, nbytes

T = TypeVar("T")


@dataclass(slots=True)
class Note:
    """What the log knows about one record besides its value."""

    record_id: int
    fingerprint: Any
    site: str
    codec: Codec | None
    random: RandomState | None  # the random streams after the decision
    inputs: Any  # a copy, in verify mode


class Position:
    """Where a replay stands: its next record, and its next checkpointed call inside."""

    record = 0
    child = 0


class RecomputeReplayRecorder(Generic[T]):
    """Ordered log of one checkpointed call's forward decisions, consumed on recompute.

    A frame is recomputed once a backward: never, once, or many times, perhaps inside itself.
    Each recompute reads from its own position, kept by thread; a `scope` in replay mode starts
    at the first record. The records of checkpointed calls made inside this one hang below it, so
    that a nested call finds its log when the outer call is recomputed.
    """

    def __init__(self) -> None:
        self._records: list[T] = []
        self._notes: list[Note] = []
        self.children: list[RecomputeReplayRecorder[T]] = []
        self._positions: dict[int, Position] = {}  # by thread
        self.forwards_open = 0
        self.ledger: Ledger | None = None
        self._held: Held | None = None
        self.name = ""
        self.labels: Mapping[str, Any] = NO_LABELS
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
        return not self._records and not self.children

    @property
    def is_partial(self) -> bool:
        """True while the forward that writes this log still runs."""
        return self.forwards_open > 0

    @property
    def position(self) -> Position:
        """Where the replay of this thread stands."""
        position = self._positions.get(get_ident())
        if position is None:
            self.begin()
            return self.position
        return position

    @property
    def _cursor(self) -> int:
        return self.position.record

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        self.position.record = value

    def __len__(self) -> int:
        return len(self._records)

    def record(self, entry: T) -> None:
        """Append one forward decision, detached from its gradient graph."""
        self.append(detached(entry))

    def append(
        self,
        entry: T,
        site: str = "",
        codec: Codec | None = None,
        random: RandomState | None = None,
        inputs: Any = None,
    ) -> None:
        """Append one detached decision with what is known about it."""
        stored = entry if codec is None else codec.encode(entry)
        self._records.append(stored)
        self._notes.append(Note(id(stored), fingerprint(stored), site, codec, random, inputs))

    def rewind(self) -> None:
        """Restart replay from the first record."""
        self.begin()

    def begin(self) -> Position | None:
        """Start this thread's replay at the first record; return the position it had."""
        thread = get_ident()
        before = self._positions.get(thread)
        self._positions[thread] = Position()
        return before

    def resume(self, position: Position) -> None:
        """Go on with this thread's replay at `position`."""
        self._positions[get_ident()] = position

    def take(self) -> T | None:
        """Return the next recorded decision, or `None` when replay outruns the log.

        Raises:
            ReplayError: when the record was changed in place after it was recorded.
        """
        position = self.position
        at = position.record
        if at >= len(self._records):
            self.replay_misses += 1
            return None
        position.record = at + 1
        return self.read(at)[0]

    def take_child(self) -> "RecomputeReplayRecorder[T] | None":
        """Return the log of the next checkpointed call inside this one, or None past the last."""
        position = self.position
        if position.child >= len(self.children):
            return None
        position.child += 1
        return self.children[position.child - 1]

    def seal(self) -> None:
        """Accept the records as they are now: the changes of `on_record_exit` are meant."""
        for note, stored in zip(self._notes, self._records, strict=False):
            note.record_id, note.fingerprint = id(stored), fingerprint(stored)
        self.count_bytes()

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

    def count_bytes(self) -> None:
        """Count the bytes of the records in the ledger until this log is freed."""
        if self.ledger is None:
            return
        held: dict[str, int] = {}
        for note, stored in zip(self._notes, self._records, strict=False):
            random_bytes = 0 if note.random is None else note.random.nbytes
            held[note.site] = held.get(note.site, 0) + nbytes(stored) + random_bytes
        self._held = None  # before the new count, lest the peak has both
        self._held = Held(self.ledger, held)
