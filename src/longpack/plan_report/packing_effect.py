"""What packing in windows saves over packing in order, in predicted step time."""

from collections.abc import Sequence
from dataclasses import dataclass

from longpack.packing import PackedRow
from longpack.packing.window import Step, pack_in_order, pack_window
from longpack.plan import CostModel, plan_step

MOST_STEPS = 64


@dataclass(frozen=True)
class PackingEffect:
    """Predicted mean step of the slowest replica, packed in order and in windows.

    Args:
        steps: compared steps, the first of the stream.
        dp: replicas, each with a row of its own.
        window_steps: steps whose documents are packed together.
        in_order_ms, window_ms: milliseconds.
        cut_in_order, cut_in_window: cuts through documents; what is cut apart attends less.
    """

    steps: int
    dp: int
    window_steps: int
    in_order_ms: float
    window_ms: float
    cut_in_order: int
    cut_in_window: int

    def __str__(self) -> str:
        return (
            f"Packing for {self.dp} replicas over {self.steps} steps: {self.in_order_ms:.4g} ms a "
            f"step in order with {self.cut_in_order} cuts through documents, "
            f"{self.window_ms:.4g} ms in windows of {self.window_steps} steps with "
            f"{self.cut_in_window}."
        )


def packing_effect(
    lengths: Sequence[int],
    row_tokens: int,
    world_size: int,
    dp: int,
    window_steps: int,
    model: CostModel,
    layout: str = "balanced",
) -> PackingEffect:
    """Compare `pack_in_order` and `pack_window` on the first documents of a stream.

    Args:
        lengths: tokens of the documents, in the order of the stream.
        row_tokens: tokens of a row.
        world_size: cp ranks that share a row.
        dp: replicas.
        window_steps: of `pack_window`.
        model: predicts.
        layout: of every row.
    """
    kept, tokens = [], 0
    for length in lengths:
        if tokens >= MOST_STEPS * dp * row_tokens:
            break
        kept.append(length)
        tokens += length
    in_order = pack_in_order(kept, row_tokens, dp)
    window = pack_window(kept, row_tokens, dp, window_steps)

    def mean_ms(steps: list[Step]) -> float:
        slowest = (
            max(_step_ms(row.documents, world_size, layout, model) for row in step)
            for step in steps
        )
        return sum(slowest) / len(steps)

    return PackingEffect(
        len(in_order),
        dp,
        window_steps,
        mean_ms(in_order),
        mean_ms(window),
        *map(_cuts, (in_order, window)),
    )


def _step_ms(row: PackedRow, world_size: int, layout: str, model: CostModel) -> float:
    plan = plan_step(row, world_size, layout, "a2a")
    return 1e3 * model.predict(plan.shards, plan.pieces, plan.kv_exchange).step_s


def _cuts(steps: list[Step]) -> int:
    pieces = [piece.doc for step in steps for row in step for piece in row.pieces]
    return len(pieces) - len(set(pieces))
