"""Judge fuzz cases: each ends in an error of our tree or in the right answer, nothing else.

A case is a function of a random generator alone, so that its room, seed and index reproduce it:

    FUZZ_SEED=0 FUZZ_CASE=123 pytest tests/fuzz -k documents
"""

import os
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from longpack.errors import CollectiveError, LongpackError

SEED = int(os.environ.get("FUZZ_SEED", "0"))
TIMES = int(os.environ.get("FUZZ_TIMES", "1"))
ONLY = os.environ.get("FUZZ_CASE")
SHOWN = 8  # failures of different kinds that a report tells in full

Case = Callable[[random.Random], str]


class WrongAnswerError(AssertionError):
    """An accepted case with another answer than the brute-force one, or a valid case refused."""


@dataclass
class Tally:
    """What became of the cases of one room."""

    room: str
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        """Cases that ran."""
        return sum(self.outcomes.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {count}" for name, count in self.outcomes.most_common())
        return f"{self.room}: {self.cases} cases in {self.seconds:.1f} s: {parts}"


# Cases of each room; their sum is what the project promises.
CASES = {
    "documents": 5000,
    "rows": 4000,
    "plans": 3000,
    "knobs": 3000,
    "run_trees": 4000,
    "run_files": 1500,
    "sharding": 2000,
    "family": 800,
    "unshard": 800,
    "attention": 1000,
    "loss": 2000,
}

TALLIES: list[Tally] = []  # read by conftest, which prints them


def judge(room: str, case: Case) -> Tally:
    """Run the cases of a room and fail with every kind of failure and how to repeat it."""
    tally = Tally(room)
    TALLIES.append(tally)
    began = time.perf_counter()
    with warnings.catch_warnings():  # a cast that loses numbers warns before it goes wrong
        warnings.simplefilter("error", RuntimeWarning)
        warnings.simplefilter("error", np.exceptions.ComplexWarning)
        for index in range(CASES[room] * TIMES) if ONLY is None else [int(ONLY)]:
            _run(tally, index, case)
    tally.seconds = time.perf_counter() - began
    told = "\n\n".join(list(tally.failures.values())[:SHOWN])
    assert not tally.failures, f"{tally}\n\n{len(tally.failures)} kinds of failure:\n\n{told}"
    return tally


def _run(tally: Tally, index: int, case: Case) -> None:
    rng = random.Random(f"{SEED} {tally.room} {index}")
    # of the CPU alone: torch.manual_seed formats a stack trace for every kind of device
    torch.default_generator.manual_seed(rng.getrandbits(32))
    try:
        outcome = case(rng)
    except BaseException as error:  # noqa: BLE001 -- any other exception is what we look for
        outcome = _verdict(error)
        if outcome.startswith("FAILED"):
            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} {where.filename}:{where.lineno} {str(error)[:40]}"
            text = "".join(traceback.format_exception(error, limit=-6))[-3000:]
            repeat = f"FUZZ_SEED={SEED} FUZZ_CASE={index} pytest tests/fuzz -k {tally.room}"
            tally.failures.setdefault(kind, f"--- case {index}: {repeat}\n{text}")
    tally.outcomes[outcome] += 1


def _verdict(error: BaseException) -> str:
    if isinstance(error, CollectiveError) and "did not arrive" in str(error):
        return "FAILED: ranks waited for each other"
    if isinstance(error, LongpackError) and len(str(error)) > 20:
        return type(error).__name__
    if type(error) is ValueError and "is unknown; it is one of" in str(error):
        return "ValueError of a knob"
    return f"FAILED: {type(error).__name__}"


@contextmanager
def sound(valid: bool) -> Iterator[None]:
    """Let errors of our tree pass, unless the case is valid: it may then not be refused."""
    try:
        yield
    except LongpackError as error:
        if valid:
            raise WrongAnswerError(f"a valid case is refused: {error}") from error
        raise


def check(right: bool, *said: object) -> None:
    """Fail the case unless the answer is right."""
    if not right:
        raise WrongAnswerError(" ".join(map(str, said)))
