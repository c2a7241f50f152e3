"""Cross-entropy whose sum over ranks is the mean over the step's targets."""

import torch
import torch.nn.functional as F

from longpack.loss.targets import IGNORE


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, num_targets: int) -> torch.Tensor:
    """Return this rank's part of the mean loss: its sum over local targets / `num_targets`.

    Losses and gradients of all ranks add up (sum, not mean) to those of one rank holding
    everything. A rank without targets contributes exactly 0.

    Args:
        logits: `[..., vocab]`, local rows; computed in fp32 at least.
        targets: `[...]`, local rows, already shifted, -100 where there is none.
        num_targets: targets of the whole step, over all ranks (`count_targets`), at least 1.
    """
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    total = F.cross_entropy(
        wide.reshape(-1, wide.shape[-1]),
        targets.reshape(-1),
        ignore_index=IGNORE,
        reduction="sum",
    )
    return total / num_targets
