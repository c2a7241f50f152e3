"""Are the kernels right? All ranks of a plan, put together, against dense float64 attention."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_check.problems import RAISED, Heads, Inputs, attention, name_of, shares, whole_segments
from longpack.blockdiag_cp.overlap import StagedAttention
from longpack.collectives import Loopback, Transport
from longpack.kernels import TILED, Segments
from longpack.packing import PackedRow
from longpack.plan import Plan, plan_step

ALLOWED_ERROR_RATIO = 2.0
PARTS = ("out", "dquery", "dkey", "dvalue")
STAGES = 2  # exchanges that arrivals are split over, where a kernel attends in parts

Results = tuple[list[Tensor], bool]  # output and gradients of the row, and if padding is zero


@dataclass(frozen=True)
class Parity:
    """Hold one parity check; `error_ratio` is the error over that of torch's own attention."""

    kernel: str
    case: str
    dtype: str
    heads: Heads
    error_ratio: dict[str, float]
    padding_is_zero: bool
    raised: str | None = None

    @property
    def worst(self) -> float:
        """The largest error ratio of all parts; infinite where the kernel raised."""
        return float("inf") if self.raised else max(self.error_ratio.values())

    @property
    def passed(self) -> bool:
        """Say whether every part stays inside its budget and padding rows are exactly zero."""
        return self.padding_is_zero and self.worst <= ALLOWED_ERROR_RATIO


@dataclass(frozen=True)
class Judge:
    """Know the exact results of a row, and the error that torch's own attention makes on it.

    Args:
        inputs: of the whole row.
        exact: output and gradients in float64.
        error: norms of the differences of torch's own attention in the dtype of the inputs.
    """

    heads: Heads
    inputs: Inputs
    exact: list[Tensor]
    error: list[float]

    @classmethod
    def of(cls, row: PackedRow, heads: Heads, dtype: torch.dtype, device: str) -> Self:
        """Compute both once for all plans and kernels."""
        inputs, segments = Inputs.draw(row.length, heads, dtype, device), whole_segments(row)
        exact = run(attention("dense", segments), inputs.double())
        plain = run(masked_sdpa(segments, device), inputs)
        floor = torch.finfo(dtype).eps / 8  # rounding alone; torch's error may be zero by luck
        error = [
            max((p.double() - e).norm().item(), floor * e.norm().item())
            for p, e in zip(plain, exact, strict=True)
        ]
        return cls(heads, inputs, exact, error)

    def checks(self, kernel: str, plan: Plan) -> Iterator[Parity]:
        """Check both ways in which a kernel runs: in one call, and in parts where it can."""
        yield self.check(kernel, plan)
        if kernel in TILED:
            yield self.check(kernel, plan, in_parts=True)

    def check(self, kernel: str, plan: Plan, in_parts: bool = False) -> Parity:
        """Compare all ranks of a plan with the exact results, in units of torch's error."""
        case = f"{plan.layout}, cp {plan.world_size}" + (", in parts" if in_parts else "")
        about = (kernel, case, name_of(self.inputs.query.dtype), self.heads)
        try:
            function = run_in_parts if in_parts else run_ranks
            ours, padding_is_zero = function(kernel, plan, self.inputs)
        except RAISED as error:
            return Parity(*about, {}, False, raised=f"{type(error).__name__}: {error}")
        ratio = {
            part: (x - exact).norm().item() / allowed if allowed else 0.0
            for part, x, exact, allowed in zip(PARTS, ours, self.exact, self.error, strict=True)
        }
        return Parity(*about, ratio, padding_is_zero)


def run(function: Callable[..., Tensor], inputs: Inputs) -> list[Tensor]:
    """Return output and gradients."""
    leaves = inputs.leaves()
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.grad_out)]


def run_ranks(kernel: str, plan: Plan, inputs: Inputs) -> Results:
    """Run every rank in turn; return output and gradients of the row, and if padding is zero.

    Results are put back and summed in float64: what is judged is the kernel, not the exchange.
    """
    length, inputs = inputs.query.shape[0], inputs.pad_to(plan.padded_length)
    whole = [x.new_zeros(x.shape, dtype=torch.float64) for x in _like_results(inputs)]
    padding_is_zero = True
    for share in shares(plan, inputs.query.device.type):
        results = run(attention(kernel, share.segments), share.of(inputs))
        rows = (share.query_rows, share.query_rows, share.key_rows, share.key_rows)
        for total, index, part in zip(whole, rows, results, strict=True):
            total.index_add_(0, index, part.double())
        padding_is_zero &= all(
            not x[a:b].any() for x in results[:2] for a, b in share.segments.padding
        )
    return [x[:length] for x in whole], padding_is_zero


def run_in_parts(kernel: str, plan: Plan, inputs: Inputs) -> Results:
    """Run all ranks at once: own rows, then what others send, in stages, merged.

    Ranks are threads. Autograd is left out, for it runs all backwards on one GPU in one thread,
    where the first rank would wait for the others forever.
    """
    plan = plan_step(plan.row, plan.world_size, plan.layout, kv_exchange="a2a")
    length, inputs = inputs.query.shape[0], inputs.pad_to(plan.padded_length)
    whole = [x.new_empty(x.shape) for x in _like_results(inputs)]

    def run_rank(transport: Transport) -> bool:
        rows = torch.from_numpy(plan.shards.rows(transport.rank)).to(inputs.query.device)
        staged = StagedAttention.make(plan, transport, rows.device, True, STAGES)
        query, key, value, grad_out = (
            x[rows] for x in (inputs.query, inputs.key, inputs.value, inputs.grad_out)
        )
        scale = query.shape[-1] ** -0.5
        out, lse, arrived = staged.forward(TILED[kernel], query, key, value, scale)
        saved = (query, key, value, out, lse, arrived)
        grad_query, grad_rows = staged.backward(TILED[kernel], grad_out, *saved, scale)
        dims = [key.shape[-1], value.shape[-1]]
        results = (out, grad_query, *grad_rows.split(dims, dim=-1))
        for total, part in zip(whole, results, strict=True):
            total.index_copy_(0, rows, part)
        return not any(x[a:b].any() for x in results[:2] for a, b in staged.local.padding)

    padding_is_zero = all(Loopback(plan.world_size).run(run_rank))
    return [x[:length].double() for x in whole], padding_is_zero


def _like_results(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs.grad_out, inputs.query, inputs.key, inputs.value


def masked_sdpa(segments: Segments, device: str) -> Callable[..., Tensor]:
    """Return torch's own attention with the segments as a full mask; padding rows see all keys.

    Value heads are padded to the size of key heads, which keeps torch on a fused kernel: its
    fallback computes in float32 and would be a different yardstick.
    """
    first, stop = segments.key_ranges(torch.device(device)).unsqueeze(-1).unbind(1)
    keys = torch.arange(segments.num_keys, device=device)
    mask = (keys >= first) & (keys < stop)
    padding = stop == 0

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | padding)
        out = out[0, ..., : value.shape[-1]].transpose(0, 1)
        return out.masked_fill(padding[..., None], 0.0)

    return function
