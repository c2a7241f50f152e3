"""What a step costs: seconds of attention, exchange and linear layers, from integers and rates."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from longpack.errors import PlanError
from longpack.packing import PackedRow
from longpack.plan.layouts import find_layout
from longpack.plan.pieces import Pieces
from longpack.plan.shards import Shards
from longpack.plan.traffic import count_traffic
from longpack.plan.transfers import choose_exchange

Seconds = NDArray[np.float64]

BACKWARD = 2.5  # of attention, over its forward: five matrix products after two
LINEAR_PASSES = 3  # forward, and gradients of inputs and of weights
CANDIDATES = (
    "contiguous",
    "head_tail",
    "zigzag",
    *(f"balanced:{tolerance}" for tolerance in (1.005, 1.02, 1.05, 1.1, 1.2)),
)
ZIGZAG_PIECES = 1_000_000  # above, zigzag alone would take longer to lay out than all the others


@dataclass(frozen=True)
class LayerShape:
    """The layers of a model, as far as their cost goes; by default those of an 8B Llama.

    Args:
        num_layers: layers of attention, each with its linear layers.
        num_heads, num_kv_heads: per rank.
        head_dim: size of a head, keys and values alike.
        linear_parameters: weights of one layer that multiply every token.
        element_bytes: bytes of one number of K and V on the wire.
        recompute: whether backward runs the layers' forward a second time.
    """

    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    linear_parameters: int = 218_103_808
    element_bytes: int = 2
    recompute: bool = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def pair_flops(self) -> float:
        """Floating-point operations of one query-key pair in one layer, all heads, all passes."""
        return 4 * self.num_heads * self.head_dim * (1 + BACKWARD + self.recompute)

    @property
    def token_flops(self) -> float:
        """Floating-point operations of one token in one layer's linear layers, all passes."""
        return 2 * self.linear_parameters * (LINEAR_PASSES + self.recompute)

    @property
    def exchanges(self) -> int:
        """Exchanges in one layer: rows there, gradients home, rows again when recomputed."""
        return 2 + self.recompute


@dataclass(frozen=True)
class Machine:
    """Rates of a machine. `longpack bench calibrate` measures them.

    The defaults are round figures for eight H100 in a node, to compare layouts before renting
    one; they are not measurements.

    Args:
        attention_flops_per_s: of the attention kernel on long segments.
        segment_s: what one more query segment adds to one pass of attention, in seconds.
        linear_flops_per_s: of large matrix products.
        near_bytes_per_s, far_bytes_per_s: one rank's link inside a node and beyond, each way.
        message_s: time of an exchange that moves nothing, in seconds.
        ranks_per_node: cp ranks that share a node.
    """

    attention_flops_per_s: float = 4e14
    segment_s: float = 2e-6
    linear_flops_per_s: float = 6e14
    near_bytes_per_s: float = 3e11
    far_bytes_per_s: float = 4e10
    message_s: float = 3e-5
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            free = name in ("segment_s", "message_s")
            if not (value >= 0 if free else value > 0):
                raise PlanError(f"{name}={value} must be {'at least' if free else 'above'} 0")


@dataclass(frozen=True, eq=False)
class StepCost:
    """Predicted seconds of one training step, forward and backward, all layers.

    Args:
        attention_s, exchange_s: of each rank, `[P]`.
        linear_s: of every rank, since all hold equally many rows.
    """

    attention_s: Seconds
    exchange_s: Seconds
    linear_s: float

    @property
    def step_s(self) -> float:
        """The step: ranks meet at every exchange, so the slowest of each part counts."""
        return float(self.attention_s.max() + self.exchange_s.max()) + self.linear_s

    def __str__(self) -> str:
        return (
            f"{1e3 * self.step_s:.4g} ms (attention {1e3 * self.attention_s.max():.4g}, exchange "
            f"{1e3 * self.exchange_s.max():.4g}, linear {1e3 * self.linear_s:.4g})"
        )


@dataclass(frozen=True)
class CostModel:
    """Predict the time of a step from its plan.

    attention = pairs * pair_flops / attention_flops_per_s + segments * segment_s * passes.
    exchange = exchanges * (message_s + the slower of near and far bytes over their rates).
    linear = local rows * token_flops / linear_flops_per_s.
    Nothing is taken to overlap, so exchanges are at their most expensive.
    """

    shape: LayerShape = field(default_factory=LayerShape)
    machine: Machine = field(default_factory=Machine)

    def predict(self, shards: Shards, pieces: Pieces, kv_exchange: str) -> StepCost:
        """Predict a step.

        Args:
            shards, pieces: the layout.
            kv_exchange: as chosen: `allgather`, `halo` or `a2a`.
        """
        shape, machine = self.shape, self.machine
        passes = 2 + shape.recompute
        attention = pieces.area * (
            shape.pair_flops / machine.attention_flops_per_s
        ) + pieces.count * (machine.segment_s * passes)
        traffic = count_traffic(kv_exchange, shards, pieces, machine.ranks_per_node)
        wire = shape.kv_bytes * np.maximum(
            traffic.near / machine.near_bytes_per_s, traffic.far / machine.far_bytes_per_s
        )
        moves = (traffic.near + traffic.far).any()  # where no rank receives, none calls
        exchange = shape.exchanges * (wire + machine.message_s * moves)
        linear = shards.local_length * shape.token_flops / machine.linear_flops_per_s
        return StepCost(
            shape.num_layers * attention, shape.num_layers * exchange, shape.num_layers * linear
        )

    def predict_head_exchange(self, row: PackedRow, world_size: int) -> StepCost | None:
        """Predict a step that exchanges heads instead of rows; None where heads do not divide.

        Ranks hold equal consecutive rows; before attention each brings together all rows of a
        P-th of the heads, and after it the rows of its own: query, key, value there, output
        back, and the same in backward (all-to-all as in DeepSpeed-Ulysses, arXiv:2309.14509).
        """
        shape, machine = self.shape, self.machine
        if shape.num_heads % world_size or shape.num_kv_heads % world_size:
            return None
        passes = 2 + shape.recompute
        attention = row.area / world_size * shape.pair_flops / machine.attention_flops_per_s
        attention += len(row) * machine.segment_s * passes
        local_length = -(-row.length // world_size)
        heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
        rank_bytes = local_length * heads * shape.head_dim * shape.element_bytes / world_size
        near = min(machine.ranks_per_node, world_size) - 1
        wire = rank_bytes * max(
            near / machine.near_bytes_per_s, (world_size - 1 - near) / machine.far_bytes_per_s
        )
        exchange = shape.exchanges * (wire + 2 * machine.message_s * (world_size > 1))
        linear = local_length * shape.token_flops / machine.linear_flops_per_s
        layers = shape.num_layers
        return StepCost(
            np.full(world_size, layers * attention),
            np.full(world_size, layers * exchange),
            layers * linear,
        )

    def head_exchange_bytes(self, local_length: int, world_size: int) -> float:
        """Return the bytes that one rank receives in one forward pass of one layer."""
        heads = 2 * self.shape.num_heads + 2 * self.shape.num_kv_heads
        row_bytes = heads * self.shape.head_dim * self.shape.element_bytes
        return local_length * row_bytes * (world_size - 1) / world_size


def choose_layout(
    row: PackedRow, world_size: int, kv_exchange: str, model: CostModel
) -> tuple[str, str]:
    """Return the layout with the shortest predicted step, and why.

    Tries `contiguous`, `head_tail`, `zigzag` (unless it makes over a million pieces) and
    `balanced` at several tolerances; of equals, the first.

    Args:
        row: the documents.
        world_size: ranks.
        kv_exchange: as asked for.
        model: the same on every rank.
    """
    costs: dict[str, StepCost] = {}
    for name in CANDIDATES:
        if name == "zigzag" and 2 * world_size * len(row) > ZIGZAG_PIECES:
            continue
        shards = find_layout(name)(row, world_size)
        exchange, _ = choose_exchange(kv_exchange, row, shards)
        costs[name] = model.predict(shards, Pieces.cut(row, shards), exchange)
    best = min(costs, key=lambda name: costs[name].step_s)
    others = sorted((cost.step_s, name) for name, cost in costs.items() if name != best)
    told = ", ".join(f"{name} {1e3 * step_s:.4g} ms" for step_s, name in others)
    return best, f"shortest predicted step: {costs[best]}, against {told}"
