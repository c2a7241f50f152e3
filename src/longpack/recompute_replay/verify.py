"""Compare recorded decisions with decisions made again in the recompute."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from longpack.errors import ReplayError
from longpack.recompute_replay.miss import place
from longpack.recompute_replay.values import leaves

Margin = Callable[[Any, Any, Any], float]
"""From (inputs, recorded, fresh): how far from a tie the decision was, in units of its scores."""


@dataclass(frozen=True)
class Drift:
    """One decision that came out differently in the recompute.

    `changed` of `total` elements differ, by `max_difference` at most where they are numbers.
    `input_drift` is the largest change of the decision's inputs; None where it is unknown, as
    the decision names no `inputs=` or its forward ran before verify mode was on.
    """

    channel: str
    site: str
    ordinal: int
    changed: int
    total: int
    max_difference: float
    input_drift: float | None
    margin: float | None
    labels: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        cause = {
            None: "whether its input had drifted is unknown (give inputs= and verify the forward)",
            0.0: "its input had not drifted: the decision itself is not deterministic",
        }.get(self.input_drift, f"its input had drifted before, by {self.input_drift}")
        by = f", by {self.max_difference:g} at most" if self.max_difference else ""
        tie = "" if self.margin is None else f"; {self.margin:.3g} from a tie"
        return (
            f"{place(self.channel, self.site, self.labels)}: decision {self.ordinal} changed in "
            f"{self.changed} of {self.total} elements{by}{tie}; {cause}"
        )


@dataclass
class VerifyReport:
    """What verify mode saw: how many replayed decisions it checked and which drifted."""

    checked: int = 0
    drifts: list[Drift] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{len(self.drifts)} of {self.checked} replayed decisions drifted"
        return "\n".join([head, *map(str, self.drifts)])

    def raise_if_drifted(self) -> None:
        """Raise ReplayError with the whole report when a decision drifted."""
        if self.drifts:
            raise ReplayError(str(self))


def compare(recorded: Any, fresh: Any) -> tuple[int, int, float]:
    """Return (elements that differ, elements, largest difference of numbers)."""
    old, new = list(leaves(recorded)), list(leaves(fresh))
    if len(old) != len(new):
        longest = max(len(old), len(new))
        return longest, longest, 0.0
    pairs = [_compare_leaf(a, b) for a, b in zip(old, new, strict=True)]
    return (
        sum(changed for changed, _, _ in pairs),
        sum(total for _, total, _ in pairs),
        max((difference for _, _, difference in pairs), default=0.0),
    )


def measure(
    recorded: Any, fresh: Any, old_inputs: Any, inputs: Any, margin: Margin | None
) -> tuple[int, int, float, float | None, float | None] | None:
    """Return (changed, total, max_difference, input_drift, margin), or None for equal decisions."""
    changed, total, difference = compare(recorded, fresh)
    if not changed:
        return None
    input_drift = None
    if old_inputs is not None and inputs is not None:
        moved, _, by = compare(old_inputs, inputs)
        input_drift = by if by or not moved else float("nan")  # moved, but not by a number
    from_tie = None if margin is None or inputs is None else margin(inputs, recorded, fresh)
    return changed, total, difference, input_drift, from_tie


def score_margin(scores: torch.Tensor, recorded: torch.Tensor, fresh: torch.Tensor) -> float:
    """Return the largest score gap, over rows, between recorded and fresh indices `[..., k]`.

    The `Margin` for decisions that pick indices of the last dim of `scores`.
    """
    gap = scores.gather(-1, recorded.long()) - scores.gather(-1, fresh.long())
    return float(gap.abs().max())


def _compare_leaf(old: Any, new: Any) -> tuple[int, int, float]:
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        same = old is new or bool(old == new)
        numbers = isinstance(old, (int, float)) and isinstance(new, (int, float))
        return int(not same), 1, float(abs(old - new)) if numbers and not same else 0.0
    total = max(old.numel(), new.numel())
    if old.shape != new.shape or old.dtype != new.dtype:
        return total, total, 0.0
    if total == 0:
        return 0, 0, 0.0
    differs = old != new
    if old.is_floating_point():
        differs &= ~(old.isnan() & new.isnan())
    if old.is_complex() or not differs.any():
        return int(differs.sum()), total, 0.0
    gap = (old.to(torch.float64) - new.to(torch.float64)).abs()
    return int(differs.sum()), total, float(gap[differs].max())
