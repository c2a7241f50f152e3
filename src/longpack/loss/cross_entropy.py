"""Cross-entropy whose sum over ranks is the mean over the step's targets."""

import torch
import torch.nn.functional as F

from longpack.errors import PackingError
from longpack.loss.targets import IGNORE, check_labels


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, num_targets: int) -> torch.Tensor:
    """Return this rank's part of the mean loss: its sum over local targets / `num_targets`.

    Losses and gradients of all ranks add up (sum, not mean) to those of one rank holding
    everything. A rank without targets contributes exactly 0.

    Args:
        logits: `[..., vocab]`, local rows; computed in fp32 at least.
        targets: `[...]`, local rows, already shifted, -100 where there is none.
        num_targets: targets of the whole step, over all ranks (`count_targets`), at least 1.

    Raises:
        PackingError: logits that are no floating-point rows for each target, targets out of
            range, or a count below 1.
    """
    check_labels(targets, "targets")
    tensor = isinstance(logits, torch.Tensor) and logits.layout is torch.strided
    rows = tensor and not logits.is_nested and logits.dtype.is_floating_point
    fits = rows and logits.dim() == targets.dim() + 1 and logits.shape[-1] > 0
    if not fits or logits.shape[:-1] != targets.shape or logits.device != targets.device:
        kind = f"{tuple(logits.shape)} on {logits.device}" if rows else type(logits).__name__
        raise PackingError(
            f"logits are {kind}, targets {tuple(targets.shape)} on {targets.device}: pass "
            "floating-point logits of [*targets.shape, vocab] on the same device"
        )
    if not isinstance(num_targets, int) or not 1 <= num_targets < 2**63:
        raise PackingError(f"num_targets={num_targets!r} must be an int64 of at least 1")
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    try:
        total = F.cross_entropy(
            wide.reshape(-1, wide.shape[-1]),
            targets.reshape(-1).long(),
            ignore_index=IGNORE,
            reduction="sum",
        )
    except IndexError as error:  # on CPU; a GPU asserts
        raise PackingError(
            f"{error} Logits have {wide.shape[-1]} classes: pass targets below that, or {IGNORE}"
        ) from None
    return total / num_targets
