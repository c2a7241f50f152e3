"""K and V that arrived in a checkpointed block's forward, on their way to its recompute."""

from contextvars import ContextVar, Token
from types import TracebackType

from torch import Tensor

from longpack.blockdiag_cp.overlap import StagedAttention
from longpack.errors import StepError

Rows = list[tuple[StagedAttention, Tensor]]


class Cursor:
    """One pass over what a block's attention calls keep: writing in forward, reading after."""

    def __init__(self, rows: Rows, replays: bool) -> None:
        self._rows, self._replays, self._at = rows, replays, 0

    def take(self, staged: StagedAttention) -> Tensor | None:
        """Return what arrived for this call in the forward; None in the forward itself."""
        if not self._replays:
            return None
        if self._at == len(self._rows) or self._rows[self._at][0] is not staged:
            raise StepError(
                f"attention call {self._at + 1} of a checkpoint recompute is not the one whose K "
                "and V the forward kept: the block must attend as often, with the same step, both "
                "times; else pass context_fn=keep_in_recompute('nothing')"
            )
        self._at += 1
        return self._rows[self._at - 1][1]

    def put(self, staged: StagedAttention, arrived: Tensor) -> None:
        """Keep what arrived."""
        if not self._replays:
            self._rows.append((staged, arrived))


# Set around a checkpointed block's forward and recompute, on the thread that runs it.
CURSOR: ContextVar[Cursor | None] = ContextVar("longpack_kept_kv", default=None)


class KeptScope:
    """Opens a cursor while entered; may be entered again, for a second backward."""

    __slots__ = ("_replays", "_rows", "_tokens")

    def __init__(self, rows: Rows, replays: bool) -> None:
        self._rows, self._replays = rows, replays
        self._tokens: list[Token] = []

    def __enter__(self) -> None:
        self._tokens.append(CURSOR.set(Cursor(self._rows, self._replays)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        CURSOR.reset(self._tokens.pop())
