"""Attention calls of each row, counted in forward and in the recompute of checkpointed layers."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class AttentionCalls:
    """Attention calls through longpack that one row makes on one rank.

    Args:
        forward: in the forward pass.
        backward: in the backward pass, where checkpointed layers recompute.
    """

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Calls of both passes."""
        return self.forward + self.backward


def expected_calls(model: Any, recomputes: bool) -> AttentionCalls:
    """Return what a row must make: one call a layer, and one more where layers recompute."""
    layers = model.config.get_text_config().num_hidden_layers
    return AttentionCalls(layers, layers if recomputes else 0)


def misfires(
    rows: Iterable[tuple[int, AttentionCalls]], expected: AttentionCalls, rank: int
) -> list[str]:
    """Name the rows and passes that made other calls than expected.

    Args:
        rows: number in the step, from 0, and what it made.
        expected: of every row.
        rank: for the words.
    """
    asked = asdict(expected)
    return [
        f"row {number} on rank {rank} ({made} attention calls in {name}, not {asked[name]})"
        for number, calls in rows
        for name, made in asdict(calls).items()
        if made != asked[name]
    ]
