"""When one document changes, does any other move?"""

import torch

from longpack.verify.batches import change_document
from longpack.verify.budget import rounding
from longpack.verify.locate import explain, first_departure, trace_ranks
from longpack.verify.report import CheckResult, Finding
from longpack.verify.runs import packed_logits, watch_ranks
from longpack.verify.subject import Subject

LEAKS = "its output for a document depends on other documents; its input does not"


def check(subject: Subject) -> CheckResult:
    """Change each document in turn on all ranks and see whose logits move."""
    moved = _movements(subject)
    limit = rounding(subject.settings.dtype)
    number = len(moved)
    pairs = [(d, e) for d in range(number) for e in range(number) if d != e]
    leaks = [(d, e) for d, e in pairs if not moved[d][e] <= limit]
    blind = [d for d in range(number) if moved[d][d] == 0]
    largest = max((moved[d][e] for d, e in pairs), default=0.0)
    said = (
        f"{number} documents changed in turn: other documents' logits moved by at most "
        f"{largest:.2g} of the largest logit"
    )
    findings = [_leak(subject, moved, leaks)] if leaks else []
    if blind:
        findings.append(_blind(blind))
    data = {"moved": moved, "limit": limit, "lengths": list(subject.row.lengths)}
    return CheckResult(said, tuple(findings), data)


def _movements(subject: Subject) -> list[list[float]]:
    """Return, by changed and by looked-at document, the largest change of a logit.

    Relative to the largest logit. A sparse model may move others by rounding, as the number of
    rows of an expert changes the order of sums.
    """
    before = packed_logits(subject)
    largest = float(before.abs().max())
    table = []
    for start, stop in subject.row:
        after = packed_logits(subject, change_document(subject.batch, start, stop))
        rows = (after - before).abs().amax(-1) / largest
        table.append([float(rows[a:b].max()) for a, b in subject.row])
    return table


def _leak(subject: Subject, moved: list[list[float]], leaks: list[tuple[int, int]]) -> Finding:
    changed, looked_at = max(leaks, key=lambda pair: moved[pair[0]][pair[1]])
    path = _where(subject, changed)
    return Finding(
        kind="boundary",
        where=path,
        fact=f"changing document {changed} moves the logits of document {looked_at} by "
        f"{moved[changed][looked_at]:.2g} of the largest logit; {len(leaks)} of "
        f"{len(moved) * (len(moved) - 1)} pairs leak",
        cause=explain(subject, path) or LEAKS,
        remedy="attend with cp_blockdiag_sdpa under the step, and reset whatever else mixes rows "
        "at step.packed_cu_seqlens",
    )


def _where(subject: Subject, changed: int) -> str:
    """Name the first module that moves rows of other documents though its own input did not."""
    start, stop = subject.row.documents[changed]
    before, after = (
        trace_ranks(watch_ranks(subject, batch, tensors=True))
        for batch in (subject.batch, change_document(subject.batch, start, stop))
    )
    rows = torch.from_numpy(subject.row.doc_ids() > 0)
    rows[start:stop] = False
    found = first_departure(after, before, rows, rounding(subject.settings.dtype))
    return found.path if found else "the model"


def _blind(documents: list[int]) -> Finding:
    return Finding(
        kind="boundary",
        where=f"documents {documents}",
        fact="changing their tokens moves none of their own logits",
        cause="the model does not read its input, or all tokens of the batch are the same",
        remedy="give a batch with different tokens; the probe sees nothing in this one",
    )
