"""See what layouts would do to your documents before renting the GPUs."""

from longpack.plan_report.lengths import (
    Documents,
    corpus_lengths,
    file_lengths,
    load_documents,
    named_lengths,
    pack_rows,
    run_file_lengths,
)
from longpack.plan_report.packing_effect import PackingEffect, packing_effect
from longpack.plan_report.report import DEFAULT_LAYOUTS, Line, PlanReport, cost_model, report

__all__ = [
    "DEFAULT_LAYOUTS",
    "Documents",
    "Line",
    "PackingEffect",
    "PlanReport",
    "corpus_lengths",
    "cost_model",
    "file_lengths",
    "load_documents",
    "named_lengths",
    "pack_rows",
    "packing_effect",
    "report",
    "run_file_lengths",
]
