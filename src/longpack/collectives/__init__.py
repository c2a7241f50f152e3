"""Differentiable exchanges between ranks: the only room that talks to process groups."""

from longpack.collectives.agreement import Vote, collect_votes, first_meeting
from longpack.collectives.delayed import Delayed
from longpack.collectives.exchange import Route, exchange_rows, gather_rows
from longpack.collectives.staged import (
    Arriving,
    Stage,
    StagedRoute,
    add_home,
    start_home,
    start_rows,
)
from longpack.collectives.transport import (
    Loopback,
    LoopbackTransport,
    Pending,
    ProcessGroupTransport,
    Transport,
    as_transport,
)

__all__ = [
    "Arriving",
    "Delayed",
    "Loopback",
    "LoopbackTransport",
    "Pending",
    "ProcessGroupTransport",
    "Route",
    "Stage",
    "StagedRoute",
    "Transport",
    "Vote",
    "add_home",
    "as_transport",
    "collect_votes",
    "exchange_rows",
    "first_meeting",
    "gather_rows",
    "start_home",
    "start_rows",
]
