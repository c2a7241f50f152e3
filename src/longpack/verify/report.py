"""What the doctor says: findings, what was measured, and the whole report."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        kind: what sort of fault, one word of `docs/verify.md`.
        where: the module, parameter, document or rank that it is in.
        fact: what was measured, with numbers.
        cause: why that happens.
        remedy: what to change.
    """

    kind: str
    where: str
    fact: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.where}: {self.fact}. {self.cause}. {self.remedy}"


@dataclass(frozen=True)
class CheckResult:
    """What one check found.

    Args:
        said: what was measured, in one sentence, also where nothing is wrong.
        findings: what is wrong.
        data: figures for JSON and pictures: numbers, strings, lists and dicts.
        name: of the check, in the table `longpack.verify.checks.CHECKS`.
        ran: False where an earlier finding made the check impossible.
    """

    said: str
    findings: tuple[Finding, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    ran: bool = True


@dataclass(frozen=True)
class Report:
    """What the doctor saw.

    Args:
        about: the model and the row that it ran on.
        settings: ranks, layout, exchange, backend, checkpointing and dtype.
        notes: what was made smaller, left out or assumed.
        results: one a check, in the order they ran.
    """

    about: str
    settings: Mapping[str, Any]
    notes: tuple[str, ...]
    results: tuple[CheckResult, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings; what causes others comes first."""
        return tuple(found for result in self.results for found in result.findings)

    @property
    def good(self) -> bool:
        """Say whether nothing is wrong."""
        return not self.findings

    def result(self, name: str) -> CheckResult:
        """Return the result of one check."""
        return next(result for result in self.results if result.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as what JSON can hold."""
        return {"good": self.good, **asdict(self)}
