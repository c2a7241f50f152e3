"""A whole row's attention, split over ranks and put together again, beside the oracle's."""

import torch
import torch.nn.functional as F

from longpack import CpStep, cp_blockdiag_sdpa
from longpack.collectives import Loopback
from longpack.verify.oracle import oracle_attention

HEADS, KV_HEADS = 4, 2


def whole_tensors(row, dtype=torch.float64, head_dim=8, v_head_dim=8):
    torch.manual_seed(row.length)
    shapes = [(HEADS, head_dim), (KV_HEADS, head_dim), (KV_HEADS, v_head_dim), (HEADS, v_head_dim)]
    return [torch.randn(1, h, row.length, d, dtype=dtype) for h, d in shapes]


def run_rank(transport, plan, tensors, step=None, **options):
    step = step or CpStep.make(plan, transport, attn_backend="flash", **options)
    rows = torch.from_numpy(plan.shards.rows(transport.rank))
    padding = plan.padded_length - plan.row.length
    *leaves, grad = (F.pad(t, (0, 0, 0, padding), value=1.0)[:, :, rows] for t in tensors)
    leaves = [t.clone().requires_grad_() for t in leaves]
    out = cp_blockdiag_sdpa(*leaves, enable_gqa=True, step=step)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def run_ranks(plan, tensors, **options):
    """Output and gradients of the whole row, in its order, of all ranks."""
    world = plan.world_size
    ranks = Loopback(world).run(lambda t: run_rank(t, plan, tensors, **options))
    order = torch.cat([torch.from_numpy(plan.shards.rows(r)) for r in range(world)]).argsort()
    joined = [torch.cat(parts, dim=2)[:, :, order] for parts in zip(*ranks, strict=True)]
    return [x[:, :, : plan.row.length] for x in joined]


def oracle(row, query, key, value, grad):
    leaves = [t.double().requires_grad_() for t in (query, key, value)]
    out = oracle_attention(*leaves, torch.from_numpy(row.doc_ids()))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]
