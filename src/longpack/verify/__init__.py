"""The doctor: prove context parallelism on a model and data, or name what is wrong.

    report = longpack.verify.verify_model("smollm2", world_size=4, layout="balanced")
    for finding in report.findings:
        print(finding)

`oracle` is apart from everything: dense attention that shares nothing with what it judges. Names
load on first use, so that importing it loads nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "CHECKS": "checks",
    "CheckResult": "report",
    "Finding": "report",
    "Report": "report",
    "import_function": "models",
    "load_model": "models",
    "verify_model": "doctor",
    "write_page": "page",
}

__all__ = [
    "CHECKS",
    "CheckResult",
    "Finding",
    "Report",
    "import_function",
    "load_model",
    "verify_model",
    "write_page",
]

if TYPE_CHECKING:
    from longpack.verify.checks import CHECKS
    from longpack.verify.doctor import verify_model
    from longpack.verify.models import import_function, load_model
    from longpack.verify.page import write_page
    from longpack.verify.report import CheckResult, Finding, Report


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'longpack.verify' has no attribute {name!r}")
    return getattr(importlib.import_module(f"longpack.verify.{_HOME[name]}"), name)
