"""The checks, in the order they run: what causes other findings comes first.

A check is one file with one function `check(subject) -> CheckResult`, and one line here.
"""

from collections.abc import Callable

from longpack.verify.checks import (
    agreement,
    boundary,
    coverage,
    inputs,
    loss,
    parity,
    recompute,
    repeat,
)
from longpack.verify.report import CheckResult
from longpack.verify.subject import Subject

Check = Callable[[Subject], CheckResult]

CHECKS: dict[str, Check] = {
    "agreement": agreement.check,
    "inputs": inputs.check,
    "coverage": coverage.check,
    "repeat": repeat.check,
    "boundary": boundary.check,
    "parity": parity.check,
    "loss": loss.check,
    "recompute": recompute.check,
}
