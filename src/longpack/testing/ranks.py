"""Ranks that stay alive: one function on every rank of a small gloo world, many times over.

Starting four interpreters costs seconds and running a check costs milliseconds, so a world is
started once per size. A world in which a check failed is thrown away: its ranks may be stuck in
different collectives.
"""

import datetime
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

GRACE_S = 0.5  # once a rank has failed, how long the others get to fail by themselves

Check = Callable[..., Any]


class RanksError(AssertionError):
    """A check failed on some rank; the message holds every rank's traceback."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank reported: a value, or the traceback of its failure."""

    value: Any = None
    failure: str | None = None


@dataclass(slots=True)
class World:
    """Live gloo ranks, one process each, waiting for checks to run."""

    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    @classmethod
    def start(cls, world_size: int, collective_timeout_s: float = 60.0) -> "World":
        """Start one interpreter per rank; they connect to each other on their own.

        Args:
            world_size: ranks.
            collective_timeout_s: after how long a collective of a rank gives up.
        """
        world = cls()
        context = multiprocessing.get_context("spawn")  # fork hangs after any torch math
        store = Path(tempfile.mkdtemp(prefix="world-")) / "store"
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, str(store), collective_timeout_s, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()  # else a dead rank would never read as end of file
            world.pipes.append(ours)
            world.processes.append(process)
        return world

    def run(self, check: Check, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run `check(rank, world_size, *args)` on every rank; return the values in rank order.

        Args:
            check: a top-level function, so that a spawned rank can import it.
            args: picklable.
            timeout_s: for all ranks together.

        Raises:
            RanksError: a rank raised, died or did not finish; the world is gone.
        """
        outcomes = self.outcomes(check, *args, timeout_s=timeout_s)
        if len(outcomes) < len(self.pipes) or any(o.failure for o in outcomes.values()):
            self.kill()
            raise RanksError(self._report(outcomes, timeout_s))
        return [outcomes[rank].value for rank in range(len(self.pipes))]

    def outcomes(
        self, check: Check, *args: Any, timeout_s: float = 60.0, grace_s: float = GRACE_S
    ) -> dict[int, Outcome]:
        """Run `check` on every rank and return what each reported, in the order they finished."""
        for pipe in self.pipes:
            pipe.send((check, args))
        deadline = time.monotonic() + timeout_s
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(self.pipes):
            pending = {p: r for r, p in enumerate(self.pipes) if r not in outcomes}
            left_s = max(0.0, deadline - time.monotonic())
            failed = any(o.failure for o in outcomes.values())
            ready = wait(list(pending), timeout=min(grace_s, left_s) if failed else left_s)
            if not ready:
                break
            for pipe, rank in pending.items():
                if pipe in ready:
                    outcomes[rank] = self._receive(pipe, rank)
        return outcomes

    def kill(self) -> None:
        """Stop every rank at once; a stuck collective cannot be asked to stop."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes.clear()

    def _receive(self, pipe: Connection, rank: int) -> Outcome:
        try:
            return pipe.recv()
        except EOFError:
            self.processes[rank].join(1)
            code = self.processes[rank].exitcode
            return Outcome(failure=f"the process died, exit code {code}\n")

    def _report(self, outcomes: dict[int, Outcome], timeout_s: float) -> str:
        lines = [f"rank {r}: {o.failure}" for r, o in outcomes.items() if o.failure]
        stuck = [r for r in range(len(self.pipes)) if r not in outcomes]
        if stuck and lines:
            lines.append(f"ranks {stuck}: still waiting for a peer when it failed")
        elif stuck:
            lines.append(f"ranks {stuck}: not finished after {timeout_s:g} s")
        return "\n".join(lines)


def _serve(rank: int, world_size: int, store: str, timeout_s: float, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    while (job := pipe.recv()) is not None:
        check, args = job
        torch.manual_seed(0)
        try:
            value = check(rank, world_size, *args)
            dist.barrier()  # a rank that ran one collective too many or too few shows here
            outcome = Outcome(value=value)
        except BaseException:  # noqa: BLE001 -- whatever a rank raises belongs in the report
            outcome = Outcome(failure=traceback.format_exc())
        pipe.send(outcome)
