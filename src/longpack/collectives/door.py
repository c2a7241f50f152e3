"""A socket at which a process answers, whatever its own program is doing.

A process that is stopped still lets others connect, but does not answer; one that has ended
refuses. So its door tells apart what a collective that never ends cannot.
"""

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ANSWER_S = 2.0  # from one that is alive, however busy


@dataclass(frozen=True)
class Address:
    """Where a door is, and the word that opens it: only ranks that were told it are answered."""

    host: str
    port: int
    word: str


class Door:
    """Answers questions, each one JSON line in and one out, on a thread of its own.

    Args:
        answer: makes the answer to a question.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer
        host = _own_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        port = self._listener.getsockname()[1]
        self.address = Address(host, port, secrets.token_hex(8))
        threading.Thread(target=self._serve, name="longpack-door", daemon=True).start()

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
            with connection:
                try:
                    self._reply(connection)
                except (OSError, ValueError, TypeError):  # a stranger, or one that has gone away
                    continue

    def _reply(self, connection: socket.socket) -> None:
        connection.settimeout(ANSWER_S)
        with connection.makefile("rw", encoding="utf-8") as lines:
            word, question = json.loads(lines.readline(1 << 16))
            if secrets.compare_digest(str(word), self.address.word):
                lines.write(json.dumps(self._answer(question)) + "\n")


def ask(address: Address, question: Any) -> Any:
    """Ask at a door, for `ANSWER_S` at most.

    Raises:
        TimeoutError: it is there, but does not answer.
        OSError: there is none, or it cannot be reached.
    """
    with (
        socket.create_connection((address.host, address.port), ANSWER_S) as connection,
        connection.makefile("rw", encoding="utf-8") as lines,
    ):
        lines.write(json.dumps([address.word, question]) + "\n")
        lines.flush()
        line = lines.readline()
    if not line:
        raise ConnectionResetError("it closed the connection")
    return json.loads(line)


def _own_host() -> str:
    """Return this machine's address as the other ranks see it: that towards the first of them."""
    first = os.environ.get("MASTER_ADDR")
    if first is None:  # ranks met through a file
        return "127.0.0.1"
    try:
        family, *_, address = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
