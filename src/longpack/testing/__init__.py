"""The public test kit: rows that break things, ranks that stay alive, checks to build on.

Names load on first use: rows need hypothesis, which only tests install.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "DANGEROUS_ROWS": "rows",
    "packed_rows": "rows",
    "RanksError": "ranks",
    "World": "ranks",
}

__all__ = ["DANGEROUS_ROWS", "RanksError", "World", "packed_rows"]

if TYPE_CHECKING:
    from longpack.testing.ranks import RanksError, World
    from longpack.testing.rows import DANGEROUS_ROWS, packed_rows


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'longpack.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"longpack.testing.{_HOME[name]}"), name)
