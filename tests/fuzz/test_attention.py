"""Fuzz attention against the oracle: odd tensors, scales, dropouts, masks, steps and ranks."""

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from tests.fuzz.judge import check, judge, sound
from tests.fuzz.oddities import NUMBERS, anything, mutate

from longpack import CpStep, PackedRow, cp_blockdiag_sdpa, plan_step
from longpack.collectives import Loopback
from longpack.verify.oracle import oracle_attention

TIMEOUT_S = 20.0
NAMES = ("query", "key", "value")
SCALES = [0.0, -0.5, 1e-3, 3, 1e308, math.nan, math.inf, -math.inf, True, "1", 1j, 10**400]


def ids_of(rng: random.Random) -> list[int]:
    """Return a document for each row, 0 on padding."""
    ids: list[int] = []
    for number in range(rng.choice([0, 1, 2, 4])):
        ids += [0] * rng.choice([0, 0, 2]) + [number + 1] * rng.randint(1, 5)
    return ids


def odd_arguments(rng: random.Random) -> dict[str, Any]:
    """Return keyword arguments, of which any may be wrong."""
    kinds = [
        lambda: {"scale": rng.choice([*SCALES, anything(rng)])},
        lambda: {"dropout_p": rng.choice([0, 0.0, 0.1, True, False, math.nan, *NUMBERS])},
        lambda: {"attn_mask": rng.choice([torch.ones(1), None, anything(rng)])},
        lambda: {"is_causal": rng.choice([True, False, None, 0, 1, "no", anything(rng)])},
        lambda: {"enable_gqa": anything(rng)},
        lambda: {"step": anything(rng)},
    ]
    return rng.choice(kinds)()


def odd_tensor(rng: random.Random, x: torch.Tensor) -> Any:
    """Return another tensor in the place of one rank's query, key or value."""
    kinds = [
        lambda: mutate(rng, x),
        lambda: x.to(rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.complex64])),
        lambda: x[:, :0],
        lambda: x[..., :0],
        lambda: x[:, :1],
        lambda: x[..., :1],
        lambda: x.repeat(2, 1, 1, 1),
        lambda: x.transpose(1, 2),
        lambda: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda: x.to("meta"),
        lambda: x.to_sparse(),
        lambda: torch.nn.Parameter(x.detach()),
        lambda: x.detach().numpy(),
    ]
    return rng.choice(kinds)()


def attention_case(rng: random.Random) -> str:
    ids = ids_of(rng)
    row = PackedRow.from_doc_ids(ids)
    layout = rng.choice(["contiguous", "zigzag", "balanced"])
    plan = plan_step(row, rng.choice([1, 2, 3]), layout, rng.choice(["allgather", "halo", "a2a"]))
    dtype = rng.choice([torch.float64, torch.float64, torch.float32])
    heads, kv_heads = rng.choice([(2, 2), (2, 1), (1, 1)])
    dims = (4, 4, rng.choice([4, 3, 5]))
    shapes = zip((heads, kv_heads, kv_heads), dims, strict=True)
    whole = [torch.randn(1, h, len(ids), d, dtype=dtype) for h, d in shapes]
    arguments: dict[str, Any] = {"enable_gqa": True}
    changed, wrong_rank, seed = None, None, rng.random()
    kind = rng.random()
    if kind < 0.35:
        arguments.update(odd_arguments(rng))
    elif kind < 0.75:
        changed = rng.choice([NAMES, ("query",), ("key",), ("value",)])
        wrong_rank = rng.choice([None, 0])  # None: on every rank alike
    backend = rng.choice(["flash", "dense"])
    # A rank whose tensors need no gradient has no backward to meet the others in.
    learns = wrong_rank is None or changed != NAMES
    padded = [F.pad(x, (0, 0, 0, plan.padded_length - len(ids)), value=9.0) for x in whole]

    def body(t: Any) -> Any:
        step = CpStep.make(plan, t, attn_backend=backend)
        rows = torch.from_numpy(plan.shards.rows(t.rank))
        local = {n: x[:, :, rows].requires_grad_() for n, x in zip(NAMES, padded, strict=True)}
        if changed and wrong_rank in (None, t.rank):
            for name in changed:
                local[name] = odd_tensor(random.Random(seed), local[name].detach())
        out = cp_blockdiag_sdpa(**local, **{"step": step, **arguments})
        leaves = [x for x in local.values() if x.requires_grad]
        grads = torch.autograd.grad(out.sum(), leaves) if out.requires_grad and learns else ()
        return rows, local, out.detach(), grads

    if "step" in arguments and arguments["step"] is None:
        return "right"  # documented to be torch's own attention, of local rows
    with sound(kind >= 0.75):
        ranks = Loopback(plan.world_size, TIMEOUT_S).run(body)
    rows = torch.cat([rows for rows, *_ in ranks])
    order = torch.argsort(rows)[: len(ids)]
    kinds = {tuple((x.dtype, *x.shape[1:2], x.shape[3]) for x in r[1].values()) for r in ranks}
    if len(kinds) > 1:  # nothing moved between ranks that differ: each is right by itself
        return "right"
    inputs = [torch.cat([local[n].detach() for _, local, _, _ in ranks], 2) for n in NAMES]
    if not all(x.abs().max() < 1e6 for x in inputs if x.numel()):
        return "right"  # a value that is no number, or overflows, is so in the oracle too
    given = [x[:, :, order].double().requires_grad_() for x in inputs]
    scale = arguments.get("scale")
    expected = oracle_attention(*given, torch.tensor(ids, dtype=torch.int64), scale)
    out = torch.cat([out for _, _, out, _ in ranks], 2)[:, :, order]
    assert_near(out, expected.detach(), inputs[0].dtype)
    grads = [grads for *_, grads in ranks]
    if all(len(each) == 3 for each in grads):
        wanted = torch.autograd.grad(expected.sum(), given)
        for name, found, right in zip(NAMES, zip(*grads, strict=True), wanted, strict=True):
            assert_near(torch.cat(found, 2)[:, :, order], right, inputs[0].dtype, name)
    return "right"


def assert_near(found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, of: str = "out"):
    """Compare with the fp64 oracle within some roundings of the dtype."""
    check(found.shape == right.shape, of, tuple(found.shape), "not", tuple(right.shape))
    size = right.abs().max().clamp(min=1.0).item() if right.numel() else 1.0
    error = (found.double() - right).abs().max().item() if right.numel() else 0.0
    check(error <= 64 * torch.finfo(dtype).eps * size, of, "is off by", error, "in", dtype)


def test_attention():
    judge("attention", attention_case)
