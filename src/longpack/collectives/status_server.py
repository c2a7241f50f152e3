"""A socket at which a process answers, whatever its own program is doing.

A process that is stopped still lets others connect, but does not answer; one that has ended
refuses. So the server tells apart what a collective that never ends cannot.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

ANSWER_S = 2.0  # from one that is alive, however busy
LINE_BYTES = 1 << 16

# A child that was forked holds the parent's socket: it would keep taking connections for a parent
# that is gone. It closes its copy; the parent's stays open.
_SERVERS: "WeakSet[StatusServer]" = WeakSet()
os.register_at_fork(after_in_child=lambda: [server._listener.close() for server in _SERVERS])


@dataclass(frozen=True)
class Address:
    """Where a server listens, on which machine, and the token without which it does not answer."""

    host: str
    port: int
    machine: str
    token: str


class StatusServer:
    """Answers questions, each one JSON line in and one out, on a thread of its own.

    Args:
        answer: makes the answer to a question.

    Raises:
        OSError: this machine lets nobody listen.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer
        host = _own_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        port = self._listener.getsockname()[1]
        self.address = Address(host, port, socket.gethostname(), secrets.token_hex(16))
        _SERVERS.add(self)
        threading.Thread(target=self._serve, name="longpack-status", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, where close does not
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            # one thread each: a stranger who says nothing keeps nobody else waiting
            threading.Thread(target=self._reply, args=(connection,), daemon=True).start()

    def _reply(self, connection: socket.socket) -> None:
        # a stranger may say anything, or go away
        with connection, suppress(OSError, ValueError, RecursionError):
            until = time.monotonic() + ANSWER_S
            token, _, question = _read_line(connection, until).partition(b" ")
            if secrets.compare_digest(token, self.address.token.encode()):
                connection.sendall(json.dumps(self._answer(json.loads(question))).encode() + b"\n")


def ask(address: Address, question: Any) -> Any:
    """Ask a server, for `ANSWER_S` at most.

    Raises:
        TimeoutError: it is there, but does not answer.
        ConnectionRefusedError, ConnectionResetError: its process is gone.
        OSError: it cannot be reached.
    """
    until = time.monotonic() + ANSWER_S
    with socket.create_connection((address.host, address.port), ANSWER_S) as connection:
        connection.sendall(f"{address.token} {json.dumps(question)}\n".encode())
        return json.loads(_read_line(connection, until))


def _read_line(connection: socket.socket, until: float) -> bytes:
    """Return a line, without its end, that is there in time."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 1e-3))
        part = connection.recv(LINE_BYTES)
        if not part or len(line) > LINE_BYTES:
            raise ConnectionResetError("it closed the connection, or says too much")
        line += part
    return line[:-1]


def _own_host() -> str:
    """Return this machine's address as the other ranks see it: that towards the first of them."""
    first = os.environ.get("MASTER_ADDR")
    if first is None:  # ranks met through a file, or their launcher
        return "127.0.0.1"
    try:
        family, *_, address = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
