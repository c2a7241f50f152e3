"""Differentiable exchanges between ranks: the only room that talks to process groups."""

from longpack.collectives.agreement import Vote, are_equal, collect_votes, count_meeting
from longpack.collectives.axis import as_transport
from longpack.collectives.delayed import Delayed
from longpack.collectives.exchange import Route, exchange_rows, gather_rows
from longpack.collectives.loopback import Loopback, LoopbackTransport
from longpack.collectives.monitor import report_exit
from longpack.collectives.process_group import ProcessGroupTransport
from longpack.collectives.staged import (
    Arriving,
    Stage,
    StagedRoute,
    add_home,
    start_home,
    start_rows,
)
from longpack.collectives.transport import Pending, Transport

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
    "are_equal",
    "as_transport",
    "collect_votes",
    "count_meeting",
    "exchange_rows",
    "gather_rows",
    "report_exit",
    "start_home",
    "start_rows",
]
