"""Plans: pure functions of integers. Who holds which rows, attends what, receives what."""

from longpack.plan.cost import CostModel, LayerShape, Machine, StepCost
from longpack.plan.layouts import LAYOUTS, find_layout
from longpack.plan.pieces import Pieces
from longpack.plan.plan import Plan, plan_step
from longpack.plan.shards import Shards
from longpack.plan.traffic import Traffic, count_traffic
from longpack.plan.transfers import EXCHANGES, RankTransfers

__all__ = [
    "EXCHANGES",
    "LAYOUTS",
    "CostModel",
    "LayerShape",
    "Machine",
    "Pieces",
    "Plan",
    "RankTransfers",
    "Shards",
    "StepCost",
    "Traffic",
    "count_traffic",
    "find_layout",
    "plan_step",
]
