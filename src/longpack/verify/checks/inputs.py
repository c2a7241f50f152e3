"""Is the model given what the batch says: documents, positions, tokens?"""

import inspect

import torch

from longpack.packing import first_difference
from longpack.plan import Plan
from longpack.verify.report import CheckResult, Finding
from longpack.verify.runs import local_rows, watch_ranks
from longpack.verify.subject import Subject


def check(subject: Subject) -> CheckResult:
    """Compare what every rank's model is given with the batch."""
    ranks = watch_ranks(subject)
    findings = [
        *_documents(subject, ranks[0][1]),
        *_rows(subject, [(watch.given, plan) for watch, plan in ranks]),
    ]
    given = ", ".join(sorted(ranks[0][0].given)) or "no tensor by name"
    return CheckResult(f"the model is given {given}", tuple(findings), {"given": given})


def _documents(subject: Subject, plan: Plan) -> list[Finding]:
    difference = first_difference([subject.row, plan.row])
    if difference is None:
        return []
    return [
        Finding(
            kind="documents",
            where="the step's plan",
            fact=f"the batch has {subject.row}, the plan {plan.row}: numbering the batch 0 "
            f"and the plan 1, {difference}",
            cause="what says where documents are was dropped or changed between the loader and "
            "the step",
            remedy=f"hand the whole batch (keys: {sorted(subject.batch)}) to shard_batch",
        )
    ]


def _rows(subject: Subject, ranks: list[tuple[dict[str, torch.Tensor], Plan]]) -> list[Finding]:
    """Compare row-wise inputs with the batch, on rows that belong to a document."""
    real = torch.from_numpy(subject.row.doc_ids() > 0)
    findings = []
    for name, kind, right in _expected(subject):
        for rank, (given, plan) in enumerate(ranks):
            mine = local_rows(right, plan, rank, 0)
            kept = local_rows(real, plan, rank, False)
            value = given.get(name)
            if value is None:
                if name == "position_ids" and _takes(subject.model, name):
                    findings.append(_no_positions(rank))
                    break
                continue
            wrong = ((value.flatten() != mine) & kept).nonzero()[:, 0]
            if len(wrong):
                at = int(wrong[0])
                findings.append(
                    Finding(
                        kind=kind,
                        where=f"{name} of rank {rank}",
                        fact=f"{len(wrong)} of {int(kept.sum())} rows differ from the batch; the "
                        f"first, local row {at}, is {int(value.flatten()[at])} and should be "
                        f"{int(mine[at])}",
                        cause=_CAUSES[kind],
                        remedy=f"pass {name} as shard_batch returns it",
                    )
                )
                break
    return findings


_CAUSES = {
    "positions": "positions do not restart at every document, or count local rows",
    "tokens": "rows were moved after the split, or split another way than the plan says",
}


def _expected(subject: Subject) -> list[tuple[str, str, torch.Tensor]]:
    positions = subject.batch.get("position_ids")
    if positions is None:
        positions = torch.from_numpy(subject.row.position_ids())
    expected = []
    if positions.dim() < 3:  # multimodal rows have a meaning of their own
        expected.append(("position_ids", "positions", positions.flatten()))
    if subject.batch.get("input_ids") is not None:
        expected.append(("input_ids", "tokens", subject.batch["input_ids"].flatten()))
    return expected


def _takes(model: torch.nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _no_positions(rank: int) -> Finding:
    return Finding(
        kind="positions",
        where=f"position_ids of rank {rank}",
        fact="the model takes position_ids and is given none",
        cause="it then counts the local rows from 0, through documents and on every rank",
        remedy="pass position_ids as shard_batch returns them",
    )
