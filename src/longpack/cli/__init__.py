"""The command line: parse, call, print. Nothing here computes, and `--help` loads no torch."""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

import longpack
from longpack.cli.bench import bench
from longpack.cli.demo import demo
from longpack.cli.plan import plan
from longpack.cli.train import train
from longpack.cli.verify import verify
from longpack.errors import LongpackError, ResultError, rank_prefix

app = App(
    name="longpack",
    help="Context parallelism for packed documents in PyTorch.",
    help_epilogue="Exit codes: 0 good, 1 a finding, 2 misuse.",
    version=longpack.__version__,
)
app.command(bench)
app.command(demo)
app.command(plan)
app.command(train)
app.command(verify)


def main(tokens: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        tokens: arguments; by default the process's own.

    Returns:
        0 when all is well, 1 for a finding (what was checked did not hold), 2 for misuse or a
        run that could not be done, with one message on stderr.
    """
    try:
        return app(tokens, exit_on_error=False, print_error=True, result_action="return_value") or 0
    except CycloptsError:  # already printed
        return 2
    except LongpackError as error:
        print(f"longpack: {_told_by(str(error))}", file=sys.stderr)
        return 1 if isinstance(error, ResultError) else 2
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        extra = _EXTRAS[error.name]
        print(
            f"longpack: this needs {error.name}, which is not installed: "
            f"pip install 'longpack[{extra}]'",
            file=sys.stderr,
        )
        return 2


_EXTRAS = {
    "gguf": "hf",
    "matplotlib": "plot",
    "pyarrow": "hf",
    "pydantic": "hf",
    "scipy": "exact",
    "tokenizers": "hf",
    "transformers": "hf",
}


def _told_by(message: str) -> str:
    """Say which rank speaks, where there are several and the message does not."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or message.startswith("rank "):
        return message
    return rank_prefix(int(os.environ["RANK"]), world_size, "world") + message
