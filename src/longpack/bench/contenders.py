"""Attention of a packed row as longpack does it and as people do it today, on given tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from longpack import CpStep, PackedRow, cp_blockdiag_sdpa, plan_step
from longpack.collectives import Transport, as_transport
from longpack.errors import ResultError
from longpack.plan import Plan

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64  # SmolLM2-135M
TOLERANCE = 1e-4  # of fp32 results summed in other orders; 3e-6 was seen at 16,384 rows on 2 ranks

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[[Tensors], torch.Tensor]  # query, key and value [1, H, S, D]


@dataclass(frozen=True)
class Problem:
    """Query, key and value `[1, S, H, D]` as models make them, and a gradient of the output."""

    leaves: Tensors
    grad: torch.Tensor

    @classmethod
    def of(
        cls,
        tokens: int,
        heads: tuple[int, int] = (HEADS, KV_HEADS),
        dtype: torch.dtype = torch.float32,
    ) -> "Problem":
        """Draw numbers, the same in every process."""
        source = torch.Generator().manual_seed(0)
        query, key, value, grad = (
            torch.randn(1, tokens, n, HEAD_DIM, generator=source, dtype=torch.float32).to(dtype)
            for n in (heads[0], heads[1], heads[1], heads[0])
        )
        return cls._with((query, key, value), grad)

    @classmethod
    def _with(cls, tensors: Tensors, grad: torch.Tensor) -> "Problem":
        query, key, value = (t.detach().requires_grad_() for t in tensors)
        return cls((query, key, value), grad)

    def to(self, dtype: torch.dtype) -> "Problem":
        """Return the same numbers in another dtype."""
        query, key, value = (t.to(dtype) for t in self.leaves)
        return self._with((query, key, value), self.grad.to(dtype))

    def shard(self, plan: Plan, rank: int) -> "Problem":
        """Return one rank's rows; rows beyond the row's end repeat its last one."""
        rows = torch.from_numpy(plan.shards.rows(rank)).clamp(max=plan.row.length - 1)
        query, key, value, grad = (t[:, rows] for t in (*self.leaves, self.grad))
        return self._with((query, key, value), grad)

    def forward(self, attend: Attend) -> torch.Tensor:
        """Return the output `[1, S, H, D]` with its graph."""
        query, key, value = (t.transpose(1, 2) for t in self.leaves)
        return attend((query, key, value)).transpose(1, 2)

    def run(self, attend: Attend) -> list[torch.Tensor]:
        """Return output and gradients `[1, S, H, D]` of one forward and backward."""
        out = self.forward(attend)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)]


def longpack_step(plan: Plan, transport: Transport, **options: Any) -> Attend:
    """One rank's attention under a step, as a model calls it."""
    step = CpStep.make(plan, transport, attn_backend="flash", **options)
    return lambda qkv: cp_blockdiag_sdpa(*qkv, enable_gqa=True, step=step)


def longpack_flash(row: PackedRow) -> Attend:
    """A step of one rank."""
    return longpack_step(plan_step(row, 1), as_transport(None))


def document_loop(row: PackedRow) -> Attend:
    """`F.scaled_dot_product_attention` on each document in turn: no wasted work, by hand.

    Rows are cut with one `split`: slices would each fill a gradient of the whole row with zeros.
    The row has no padding.
    """
    lengths = list(row.lengths)

    def attend(qkv: Tensors) -> torch.Tensor:
        documents = zip(*(t.split(lengths, dim=2) for t in qkv), strict=True)
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            for q, k, v in documents
        ]
        return torch.cat(outs, dim=2)

    return attend


def dense_mask(row: PackedRow) -> Attend:
    """One `F.scaled_dot_product_attention` call with a block-causal mask: what stock models do."""
    ids = torch.from_numpy(row.doc_ids())
    mask = ((ids[:, None] == ids[None]).tril())[None, None]

    def attend(qkv: Tensors) -> torch.Tensor:
        return F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True)

    return attend


LONGPACK, LOOP, DENSE = "longpack_flash", "document_loop", "dense_mask"
CONTENDERS: dict[str, Callable[[PackedRow], Attend]] = {
    LONGPACK: longpack_flash,
    LOOP: document_loop,
    DENSE: dense_mask,
}


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference relative to the largest number of its tensor, or NaN."""
    differences = [
        (ours - theirs).abs().max() / theirs.abs().max()
        for ours, theirs in zip(found, expected, strict=True)
    ]
    return torch.stack(differences).max().item()  # Python's max would pass over NaN


def difference_of_rank(
    found: list[torch.Tensor], expected: list[torch.Tensor], plan: Plan, rank: int
) -> float:
    """Compare one rank's rows, without padding, with those of a whole row."""
    rows = torch.from_numpy(plan.shards.rows(rank))
    real = rows < plan.row.length
    return largest_difference([x[:, real] for x in found], [x[:, rows[real]] for x in expected])


def too_different(differences: Mapping[str, float]) -> dict[str, float]:
    """Return those that are above `TOLERANCE`, or not a number."""
    return {name: x for name, x in differences.items() if not x <= TOLERANCE}


def require_equal(differences: Mapping[str, float]) -> float:
    """Return the largest of the differences, told by whose they are.

    Raises:
        ResultError: some are above `TOLERANCE`, or not a number.
    """
    wrong = too_different(differences)
    if wrong:
        told = ", ".join(f"{name} by {x:.1e}" for name, x in wrong.items())
        raise ResultError(
            f"contenders differ: {told}, relative to the largest number; allowed {TOLERANCE:g}. "
            "They do not compute the same, so none was timed. `longpack verify --model smollm2` "
            "looks for the part that is wrong on this machine"
        )
    return max(differences.values())


def check_contenders(problem: Problem, attends: Mapping[str, Attend]) -> float:
    """Run every contender and return the largest difference from the loop over documents.

    Raises:
        ResultError: a contender's results are wrong.
    """
    expected = problem.run(attends[LOOP])
    others = {name: attend for name, attend in attends.items() if name != LOOP}
    return require_equal(
        {name: largest_difference(problem.run(a), expected) for name, a in others.items()}
    )
