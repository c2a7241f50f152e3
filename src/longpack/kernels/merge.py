"""Join attention over two sets of keys into attention over their union."""

import torch
from torch import Tensor


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of log-sum-exps, and of sums that are rounded once."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge attention over other keys into `out` and `lse`, in place.

    With lse = log sum_k exp(score_k), attention over the union of two disjoint sets of keys is
    the average of the two outputs weighted by exp(lse), and its lse is the logaddexp of theirs.
    A side that has seen no key has lse -inf and out 0, and leaves the other side as it is.

    Args:
        out, other_out: [..., D]; a low-precision `out` is combined in the precision of `lse` and
            rounded once.
        lse, other_lse: out.shape[:-1], float32 or float64, natural logarithm.
    """
    total = torch.logaddexp(lse, other_lse)
    reference = total.masked_fill(total == -torch.inf, 0.0)  # exp(-inf - -inf) would be nan
    weight = (other_lse - reference).exp_().unsqueeze(-1)
    if out.dtype == lse.dtype:
        out.lerp_(other_out.to(out.dtype), weight)
    else:
        out.copy_(torch.lerp(out.to(lse.dtype), other_out.to(lse.dtype), weight))
    lse.copy_(total)
