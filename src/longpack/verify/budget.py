"""How much rounding may cost, measured on this model and this row."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from longpack.verify.runs import Ran, RunFailedError, run_alone
from longpack.verify.subject import Subject

# Of the error that documents one by one have in the same dtype. Over 72 runs of six dense and
# sparse model types, right ones reached 2.0, where a key's bias has a gradient of rounding alone.
FACTOR = 4.0


def half_the_digits(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding does not reach and a fault does.

    Models compute norms, rotary angles and the loss in fp32 whatever the dtype.
    """
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** 0.5


def rounding(dtype: torch.dtype) -> float:
    """Return the relative change that another order of the same sums may make."""
    return max(4 * torch.finfo(dtype).eps, 64 * torch.finfo(torch.float32).eps)


@dataclass(frozen=True, eq=False)
class Yardstick:
    """What is right, and how far rounding alone takes documents one by one from it.

    Args:
        exact: documents one by one, in the widest dtype that the model runs in.
        plain: the same in the run's dtype; None where that is the widest.
        dtype: of the run.
    """

    exact: Ran
    plain: Ran | None
    dtype: torch.dtype

    @classmethod
    def of(cls, subject: Subject) -> "Yardstick":
        """Run documents one by one, in fp64 where the model can, and in the run's dtype."""
        dtype = subject.settings.dtype
        plain = run_alone(subject, dtype)
        if dtype == torch.float64:
            return cls(plain, None, dtype)
        try:
            return cls(run_alone(subject, torch.float64), plain, dtype)
        except RunFailedError:
            return cls(plain, None, dtype)

    @property
    def said(self) -> str:
        """Say how the budget was found."""
        if self.plain is None:
            return f"half the digits of the dtype, {half_the_digits(self.dtype):.2g}"
        return f"{FACTOR:g} times what {self.dtype} costs documents one by one against float64"

    def errors(self, ran: Ran) -> dict[str, float]:
        """Return the relative error of the logits and of each parameter's gradient."""
        return relative_errors(ran, self.exact)

    @cached_property
    def plain_errors(self) -> dict[str, float]:
        """What rounding alone costs."""
        return {} if self.plain is None else self.errors(self.plain)

    @cached_property
    def _floor(self) -> float:
        median = float(torch.tensor(list(self.plain_errors.values())).double().median())
        return max(median, torch.finfo(self.dtype).eps)

    def budget(self, name: str) -> float:
        """Return the largest error of a quantity that rounding explains."""
        if self.plain is None:
            return half_the_digits(self.dtype)
        return FACTOR * max(self.plain_errors.get(name, 0.0), self._floor)


def relative_errors(ours: Ran, exact: Ran) -> dict[str, float]:
    """Return |ours - exact| / |exact| for logits and gradients, in the Euclidean norm.

    A gradient that is nearly zero (an unused expert, a key's bias) is measured against 1e-3 of
    the root mean square of all gradients, as its own rounding would be divided by nothing.
    """
    errors = {"logits": _apart(ours.logits, exact.logits, 0.0)}
    entries = sum(g.numel() for g in exact.gradients.values())
    squares = sum(float(g.double().square().sum()) for g in exact.gradients.values())
    usual = 1e-3 * (squares / max(entries, 1)) ** 0.5
    for name in dict.fromkeys([*exact.gradients, *ours.gradients]):  # in the model's order
        a, b = (_or_zero(run.gradients, name, ours, exact) for run in (ours, exact))
        errors[name] = _apart(a, b, usual * b.numel() ** 0.5)
    return errors


def _or_zero(gradients: Mapping[str, torch.Tensor], name: str, *runs: Ran) -> torch.Tensor:
    if name in gradients:
        return gradients[name]
    return torch.zeros_like(next(r.gradients[name] for r in runs if name in r.gradients))


def _apart(ours: torch.Tensor, exact: torch.Tensor, least: float) -> float:
    scale = max(float(exact.double().norm()), least, torch.finfo(torch.float64).tiny)
    return float((ours.double() - exact.double()).norm()) / scale
