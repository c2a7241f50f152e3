"""The one error tree of longpack.

Every message tells the fact with numbers, the cause, and the remedy by argument name.
Each class is also a ValueError (the caller gave something that cannot be right) or a
RuntimeError (something that was right failed to happen).
"""


class LongpackError(Exception):
    """Root of every error that longpack raises."""


class PackingError(LongpackError, ValueError):
    """The documents of a batch cannot be read, or two ways of saying them contradict."""


class PlanError(LongpackError, ValueError):
    """A plan was asked for that does not exist: unknown layout, bad world size."""


class UnsupportedError(LongpackError, ValueError):
    """A request that the chosen implementation cannot honour; lists every reason."""


class StepError(LongpackError, RuntimeError):
    """Attention was called with no step, or with a step that does not fit its tensors."""


class AgreementError(LongpackError, RuntimeError):
    """Ranks that must hold the same plan do not."""


class CollectiveError(LongpackError, RuntimeError):
    """A collective failed or did not finish in time."""


class ReplayError(LongpackError, RuntimeError):
    """A recorded decision cannot be replayed."""


class ResultError(LongpackError, RuntimeError):
    """Results that must be equal are not: a finding, so the command line exits with 1."""


class RunError(LongpackError, ValueError):
    """A run file, a data source or a checkpoint folder is not usable."""


class LongpackWarning(UserWarning):
    """Something works but not as well as it could; the message says what to change."""


def rank_prefix(rank: int, world_size: int, axis: str = "cp") -> str:
    """Return the words that begin every error of one rank: `rank 3 of 8 (cp): `."""
    return f"rank {rank} of {world_size} ({axis}): "
