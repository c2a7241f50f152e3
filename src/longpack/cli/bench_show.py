"""How every `longpack bench` command ends: a table, or JSON."""

import json as json_format
from collections.abc import Callable
from typing import Any

from rich.console import Console


def show(result: dict[str, Any], json: bool, print_result: Callable[..., None]) -> int:
    """Print a result as JSON or as `print_result(result, console)` does; return the exit code."""
    if json:
        print(json_format.dumps(result, indent=2))
    else:
        print_result(result, Console(width=max(Console().width, 100)))
    return 0
