"""Record decisions in the forward pass and replay them in the checkpoint recompute."""

from longpack.recompute_replay.phase import is_recomputing, once_per_forward

__all__ = ["is_recomputing", "once_per_forward"]
