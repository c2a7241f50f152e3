"""Differentiable exchanges between ranks: the only room that talks to process groups."""

from longpack.collectives.agreement import Vote, collect_votes, first_meeting
from longpack.collectives.exchange import Route, exchange_rows, gather_rows
from longpack.collectives.transport import (
    Loopback,
    LoopbackTransport,
    ProcessGroupTransport,
    Transport,
    as_transport,
)

__all__ = [
    "Loopback",
    "LoopbackTransport",
    "ProcessGroupTransport",
    "Route",
    "Transport",
    "Vote",
    "as_transport",
    "collect_votes",
    "exchange_rows",
    "first_meeting",
    "gather_rows",
]
