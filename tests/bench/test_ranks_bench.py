"""`longpack bench ranks`: contenders agree before they are timed, and every figure is there."""

import pytest
import torch

from longpack import PackedRow, plan_step
from longpack.bench import ranks
from longpack.bench.rivals import Ring, Ulysses
from longpack.collectives import Loopback
from longpack.errors import UnsupportedError
from longpack.verify.oracle import oracle_attention

ROW = PackedRow.from_lengths([30, 5, 1, 60, 24])


def whole(heads):
    torch.manual_seed(0)
    return [torch.randn(ROW.length, n, 8, dtype=torch.float64) for n in (*heads, heads[0])]


def oracle(tensors):
    *leaves, grad = (t.transpose(0, 1)[None].clone() for t in tensors)
    for leaf in leaves:
        leaf.requires_grad_()
    out = oracle_attention(*leaves, torch.from_numpy(ROW.doc_ids()))
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    return [x[0].transpose(0, 1) for x in found]


@pytest.mark.parametrize("layout", ["head_tail", "contiguous"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rivals_are_exact(world_size, layout):
    tensors = whole((12, 12, 12))
    expected = oracle(tensors)
    plan = plan_step(ROW, world_size, layout, "a2a")
    assert plan.padded_length == ROW.length

    def body(t):
        rows = torch.from_numpy(plan.shards.rows(t.rank))
        *mine, grad = (x[rows] for x in tensors)
        rivals = [Ring(plan, t)]
        if layout == "contiguous":
            rivals.append(Ulysses(ROW, t, 12, 12))
        for attend in rivals:
            leaves = [x.clone().requires_grad_() for x in mine]
            out = attend(*leaves)
            found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs[rows], rtol=1e-12, atol=1e-12)

    Loopback(world_size).run(body)


def test_ulysses_refuses_heads_that_do_not_divide():
    with pytest.raises(UnsupportedError, match="9/3 heads cannot be dealt to 2 ranks"):
        Loopback(2).run(lambda t: Ulysses(ROW, t, 9, 3))


def test_the_bench_gives_every_figure():
    result = ranks.run_ranks_bench(512, rounds=1, delay_ms=5.0)
    contenders = {
        "balanced_a2a",
        "balanced_a2a_waited",
        "contiguous_allgather",
        "zigzag_a2a",
        "ring",
        "document_loop",
    }
    assert set(result["median_ms"]) == {*contenders, "dense_mask_two_threads"}
    assert set(result["divisible_heads"]["median_ms"]) == {*contenders, "ulysses"}
    assert set(result["not_run"]) == {"ulysses"}
    assert result["largest_difference"] < ranks.TOLERANCE


def test_contenders_that_differ_are_not_timed():
    good = [torch.ones(3)]
    assert ranks._largest(good, good) == 0.0
    with pytest.raises(AssertionError, match=r"contenders differ by 5\.0e-01"):
        ranks._largest([torch.tensor([1.0, 1.0, 0.5])], good)
    with pytest.raises(AssertionError, match="nan"):
        ranks._largest([torch.tensor([float("nan")])], [torch.ones(1)])
