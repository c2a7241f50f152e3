"""Labels, token counts and cross-entropy that stay right when a row is split."""

from longpack.loss.cross_entropy import cross_entropy
from longpack.loss.targets import IGNORE, check_labels, count_targets, next_token_targets

__all__ = ["IGNORE", "check_labels", "count_targets", "cross_entropy", "next_token_targets"]
