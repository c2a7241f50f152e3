"""See what layouts would do to your documents before renting the GPUs."""

from longpack.plan_report.lengths import (
    corpus_lengths,
    file_lengths,
    load_rows,
    named_lengths,
    pack_rows,
    run_file_lengths,
)
from longpack.plan_report.report import DEFAULT_LAYOUTS, Line, PlanReport, cost_model, report

__all__ = [
    "DEFAULT_LAYOUTS",
    "Line",
    "PlanReport",
    "corpus_lengths",
    "cost_model",
    "file_lengths",
    "load_rows",
    "named_lengths",
    "pack_rows",
    "report",
    "run_file_lengths",
]
