"""Is the model given what the batch says: documents, positions, tokens?"""

import inspect
from collections.abc import Iterator

import torch

from longpack.packing import first_difference
from longpack.plan import Plan
from longpack.verify.report import CheckResult, Finding
from longpack.verify.runs import local_rows, read_inputs
from longpack.verify.subject import Subject


def check(subject: Subject) -> CheckResult:
    """Compare what every rank's model is given with the batch."""
    ranks = read_inputs(subject)
    findings = [*_documents(subject, ranks[0][1]), *_rows(subject, ranks)]
    given = ", ".join(sorted(ranks[0][0])) or "no tensor by name"
    return CheckResult(f"the model is given {given}", tuple(findings), {"given": given})


def _documents(subject: Subject, plan: Plan) -> Iterator[Finding]:
    if plan.row.documents == subject.row.documents:  # a longer row is padding at its end
        return
    yield Finding(
        kind="documents",
        where="the step's plan",
        fact=f"the batch has {subject.row}, the plan {plan.row}: numbering the batch 0 "
        f"and the plan 1, {first_difference([subject.row, plan.row])}",
        cause="what says where documents are was dropped or changed between the loader and the "
        "step",
        remedy=f"hand the whole batch (keys: {sorted(subject.batch)}) to shard_batch",
    )


def _rows(subject: Subject, ranks: list[tuple[dict[str, torch.Tensor], Plan]]) -> list[Finding]:
    """Compare row-wise inputs with the batch; of each, the first rank that is wrong."""
    found = []
    for name, right in _expected(subject):
        wrong = (
            finding
            for rank, (given, plan) in enumerate(ranks)
            for finding in _row_input(subject, name, right, rank, given, plan)
        )
        found.extend([*wrong][:1])
    return found


def _row_input(
    subject: Subject,
    name: str,
    right: torch.Tensor,
    rank: int,
    given: dict[str, torch.Tensor],
    plan: Plan,
) -> Iterator[Finding]:
    """Compare one input of one rank with the batch, on rows that belong to a document.

    Args:
        right: of the whole row, `[S]` or `[S, R]`, which the model takes as `[R, 1, S]`.
    """
    value = given.get(name)
    if value is None:
        if given and name == "position_ids" and _takes(subject.model, name):
            yield _no_positions(rank)
        return
    mine = local_rows(right, plan, rank, 0)[None]
    if mine.dim() == 3:
        mine = mine.movedim(2, 0)
    where = f"{name} of rank {rank}"
    remedy = f"pass {name} as shard_batch returns it"
    if value.shape not in (mine.shape, mine.shape[1:]):
        yield Finding(
            kind=_KINDS[name],
            where=where,
            fact=f"it is {tuple(value.shape)} and should be {tuple(mine.shape)}: this rank's "
            f"{plan.local_length} of {plan.padded_length} rows, in the last dimension",
            cause="it was not split, or along another dimension than its last",
            remedy=remedy,
        )
        return
    value = value.view(mine.shape)
    kept = local_rows(torch.from_numpy(subject.row.doc_ids() > 0), plan, rank, False)
    wrong = ((value != mine) & kept).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        yield Finding(
            kind=_KINDS[name],
            where=where,
            fact=f"{len(wrong)} of {int(kept.sum()) * mine.shape[0]} values differ from the batch; "
            f"the first, local row {at[-1]}, is {int(value[at])} and should be {int(mine[at])}",
            cause=_CAUSES[name],
            remedy=remedy,
        )


_KINDS = {"position_ids": "positions", "input_ids": "tokens"}
_CAUSES = {
    "position_ids": "positions do not restart at every document, or count local rows",
    "input_ids": "rows were moved after the split, or split another way than the plan says",
}


def _expected(subject: Subject) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what models are given by rows, rows first."""
    positions = subject.batch.get("position_ids")
    if positions is None:
        positions = torch.from_numpy(subject.row.position_ids())
    several = positions.dim() == 3  # [R, B, S] of multimodal rotary models
    yield "position_ids", positions.flatten(1).T if several else positions.flatten()
    if subject.batch.get("input_ids") is not None:
        yield "input_ids", subject.batch["input_ids"].flatten()


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
