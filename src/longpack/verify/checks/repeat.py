"""Does the model compute the same thing twice?"""

import torch

from longpack.verify.budget import rounding
from longpack.verify.locate import explain, first_departure, trace_ranks
from longpack.verify.report import CheckResult, Finding
from longpack.verify.runs import packed_logits, watch_ranks
from longpack.verify.subject import Subject


def check(subject: Subject) -> CheckResult:
    """Run one batch twice and compare the logits."""
    first, second = packed_logits(subject), packed_logits(subject)
    moved = float((first - second).abs().max() / first.abs().max())
    said = f"the same batch twice: logits differ by {moved:.2g} of the largest"
    if moved <= rounding(subject.settings.dtype):
        return CheckResult(said, (), {"moved": moved})
    once, again = (trace_ranks(watch_ranks(subject, tensors=True)) for _ in range(2))
    rows = torch.from_numpy(subject.row.doc_ids() > 0)
    found = first_departure(once, again, rows, rounding(subject.settings.dtype))
    path = found.path if found else "the model"
    finding = Finding(
        kind="repeat",
        where=path,
        fact=said,
        cause=explain(subject, path)
        or "a cache or other state is kept from one call to the next, or numbers are drawn "
        "(dropout)",
        remedy="keep nothing between calls and set dropout to 0, or later findings mean little",
    )
    return CheckResult(said, (finding,), {"moved": moved})
