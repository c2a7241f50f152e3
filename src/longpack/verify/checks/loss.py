"""Is the model's own loss, and its gradient, this rank's part of the mean over all targets?"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from longpack.collectives import Transport
from longpack.loss import IGNORE, count_targets, cross_entropy
from longpack.plan import Plan
from longpack.verify.batches import Batch, without_labels
from longpack.verify.budget import half_the_digits
from longpack.verify.report import CheckResult, Finding
from longpack.verify.runs import Model, local_rows, on_ranks, read_outputs
from longpack.verify.subject import Subject


@dataclass(frozen=True)
class Observed:
    """One rank's loss.

    Args:
        loss: the model's own; None where it returns none.
        right: what it should be, from its own logits.
        gradient: relative distance of its gradient in the logits from the right one; None where
            it cannot be taken.
        targets: of this rank.
        apart: part of the loss comes from parameters in another way than through the logits.
        wrong: what each kind of mistake would give.
    """

    loss: float | None
    right: float
    gradient: float | None
    targets: int
    apart: bool
    wrong: dict[str, float]


def check(subject: Subject) -> CheckResult:
    """Compare each rank's loss with the right one, also where some ranks have no target."""
    whole = _observe(subject, subject.batch)
    if whole[0].loss is None:
        return CheckResult("the model returns no loss of its own: longpack.loss.cross_entropy is")
    sparse = _observe(subject, _only_first_rank(subject))
    tolerance = half_the_digits(subject.settings.dtype)
    named = (("the batch", whole), ("targets on rank 0 alone", sparse))
    off = [(name, ranks) for name, ranks in named if _off(ranks, tolerance)]
    beside = [_beside(ranks, tolerance) for _, ranks in off]
    auxiliary = bool(off) and all(beside)
    findings = [] if auxiliary else [_finding(name, ranks, tolerance) for name, ranks in off]
    total, right = (sum(getattr(r, k) or 0.0 for r in whole) for k in ("loss", "right"))
    empty = sum(r.targets == 0 for r in sparse)
    said = (
        f"losses of {len(whole)} ranks add up to {total:.6f}, the mean over "
        f"{sum(r.targets for r in whole)} targets is {right:.6f}; with targets on rank 0 "
        f"alone, {empty} of the ranks had none"
    )
    data = {
        "ranks": [{"loss": r.loss, "right": r.right, "targets": r.targets} for r in whole],
        "gradient_error": max((r.gradient or 0.0) for r in [*whole, *sparse]),
    }
    if auxiliary:
        terms, alone = _terms(whole), sum(_terms(_observe(subject, subject.batch, world_size=1)))
        said += (
            f"; beside it stands an auxiliary term, no function of the logits, of "
            f"{sum(terms):.6f} over {len(whole)} ranks and {alone:.6f} on one. Where each rank "
            "takes it as a mean over its own rows, divide its coefficient by the number of ranks"
        )
        data["auxiliary"] = {"ranks": terms, "one_rank": alone}
    return CheckResult(said, tuple(findings[:1]), data)


def _beside(ranks: list[Observed], tolerance: float) -> bool:
    """Say whether what is not cross-entropy stands beside it: the logits' gradient is right."""
    return all(r.apart and r.gradient is not None and r.gradient <= tolerance for r in ranks)


def _terms(ranks: list[Observed]) -> list[float]:
    return [(r.loss or 0.0) - r.right for r in ranks]


def _observe(subject: Subject, batch: Batch, world_size: int | None = None) -> list[Observed]:
    def body(transport: Transport, model: Model) -> Observed:
        share = subject.share(transport, batch)
        logits, loss = read_outputs(subject.call(model, share))
        whole = subject.read_targets(batch)
        targets, count = local_rows(whole, share.plan, transport.rank), count_targets(whole)
        leaf = logits.detach()[0].cpu().requires_grad_()
        right = cross_entropy(leaf, targets, count)
        gradient = None
        if loss is not None and loss.requires_grad:
            (expected,) = torch.autograd.grad(right, leaf)
            (own,) = torch.autograd.grad(loss, logits, allow_unused=True)
            gradient = None if own is None else _distance(own[0].cpu(), expected)
        return Observed(
            loss=None if loss is None else loss.item(),
            right=right.item(),
            gradient=gradient,
            targets=int((targets != IGNORE).sum()),
            apart=loss is not None and _has_term_apart(loss, logits),
            wrong=_mistakes(subject, batch, share.plan, transport.rank, leaf.detach()),
        )

    return on_ranks(subject, body, world_size)


def _has_term_apart(loss: torch.Tensor, logits: torch.Tensor) -> bool:
    """Say whether the loss's graph reaches a leaf without passing the logits."""
    through, seen, left = logits.grad_fn, set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node is through or node in seen:
            continue
        if hasattr(node, "variable"):  # of a leaf: a parameter
            return True
        seen.add(node)
        left += [before for before, _ in node.next_functions]
    return False


def _only_first_rank(subject: Subject) -> Batch:
    """Return the batch with targets on the rows of rank 0 alone: the others have none."""
    plan = subject.plan
    kept = torch.zeros(plan.padded_length, dtype=torch.bool)
    kept[torch.from_numpy(plan.shards.rows(0))] = True
    return without_labels(subject.batch, kept[: subject.row.length], subject.row)


def _off(ranks: list[Observed], tolerance: float) -> bool:
    values = any(not _near(r.loss, r.right, tolerance) for r in ranks)
    return values or any(not (r.gradient or 0.0) <= tolerance for r in ranks)


def _near(a: float | None, b: float, tolerance: float) -> bool:
    if a is None or math.isnan(a) or math.isnan(b):
        return a is not None and math.isnan(a) and math.isnan(b)
    return abs(a - b) <= tolerance * max(abs(b), 1e-3)


def _finding(name: str, ranks: list[Observed], tolerance: float) -> Finding:
    fits = [
        mistake
        for mistake in ranks[0].wrong
        if all(_near(r.loss, r.wrong[mistake], tolerance) for r in ranks)
    ]
    off = next((i for i, r in enumerate(ranks) if not _near(r.loss, r.right, tolerance)), None)
    if off is None:
        worst = max(ranks, key=lambda r: r.gradient or 0.0)
        fact = (
            f"with {name} the losses are right but their gradient in the logits is "
            f"{worst.gradient:.2g} off"
        )
        cause = "the loss is scaled or detached between its value and its backward"
    else:
        r = ranks[off]
        fact = (
            f"with {name} the loss of rank {off} ({r.targets} targets) is {r.loss:.6f} and should "
            f"be {r.right:.6f}"
        )
        cause = fits[0] if fits else "it is no cross-entropy of the logits that the doctor knows"
        if r.apart and not fits:
            cause += (
                ", beside an auxiliary term that is no function of the logits: with that term "
                "switched off the rest may be known"
            )
    return Finding(
        kind="loss",
        where="the model's loss" if off is None else f"the loss of rank {off}",
        fact=fact,
        cause=cause,
        remedy="return longpack.loss.cross_entropy(logits, shift_labels, num_items_in_batch), all "
        "three as shard_batch gives them, and add losses up over ranks",
    )


def _mistakes(
    subject: Subject, batch: Batch, plan: Plan, rank: int, logits: torch.Tensor
) -> dict[str, float]:
    """Return the loss that each combination of wrong targets and wrong divisor would give."""
    right = subject.read_targets(batch)
    labels = batch.get("labels")
    labels = right if labels is None else labels.flatten()
    wholes = {
        "": right,
        "targets cross from one document into the next": _shifted(labels),
        "labels are not shifted": labels,
    }
    targets = {name: (local_rows(whole, plan, rank), whole) for name, whole in wholes.items()}
    for name, unshifted in (
        ("labels are shifted after the split", labels),
        ("labels are shifted twice", right),
    ):
        targets[name] = (_shifted(local_rows(unshifted, plan, rank)), right)
    found = {}
    for numerator, (ours, whole) in targets.items():
        total = F.cross_entropy(logits.double(), ours, ignore_index=IGNORE, reduction="sum").item()
        for denominator, divisor in _DIVISORS.items():
            by = divisor(ours, whole, plan)
            causes = " and ".join(c for c in (numerator, denominator) if c)
            found[causes] = total / by if by else math.nan
    found.pop("")
    return found


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    return torch.cat([labels[1:], labels.new_full((1,), IGNORE)])


_Divisor = Callable[[torch.Tensor, torch.Tensor, Plan], float]
_DIVISORS: dict[str, _Divisor] = {
    "": lambda ours, whole, plan: count_targets(whole),
    "each rank divides by its own number of targets": lambda ours, whole, plan: int(
        (ours != IGNORE).sum()
    ),
    "each rank divides by its own number of targets and by the number of ranks": (
        lambda ours, whole, plan: int((ours != IGNORE).sum()) * plan.world_size
    ),
    "the loss is averaged over ranks that already divided by all targets": (
        lambda ours, whole, plan: count_targets(whole) * plan.world_size
    ),
    "the sum is not divided": lambda ours, whole, plan: 1,
    "the sum is divided by rows, not targets": lambda ours, whole, plan: plan.local_length,
}


def _distance(own: torch.Tensor, right: torch.Tensor) -> float:
    scale = float(right.double().norm())
    return float((own.double() - right.double()).norm()) / scale if scale else float(own.norm())
