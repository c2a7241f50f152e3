"""`longpack bench ranks`: contenders agree before they are timed, and every figure is there."""

import io

import pytest
import torch
from rich.console import Console

from longpack import PackedRow, plan_step
from longpack.bench import ranks
from longpack.bench.contenders import largest_difference
from longpack.bench.lengths import pack_row
from longpack.bench.rivals import Ring, Ulysses
from longpack.cli.bench_ranks import print_ranks
from longpack.collectives import Loopback
from longpack.errors import PlanError, UnsupportedError
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
    contenders = {*ranks.LAYOUTS, "ring", "document_loop"}
    assert set(result["median_ms"]) == {*contenders, "dense_mask_two_threads"}
    assert set(result["divisible_heads"]["median_ms"]) == {"balanced_a2a", "ulysses"}
    assert set(result["not_run"]) == {"ulysses"}
    assert set(result["over_balanced"]) == set(result["median_ms"]) - {"balanced_a2a"}
    assert set(result["exposed_ms"]) == {"hidden", "waited"}
    assert result["largest_difference"] < ranks.TOLERANCE
    shown = printed(result)
    assert "8/4 heads of 64" in shown
    assert "not run: ulysses: 9/3 heads cannot be dealt to 2 ranks" in shown
    assert "waited for a link slowed by 5 ms" in shown


def test_few_contenders_on_an_uneven_row():
    """Of rows from seed 0 on, the first whose contiguous halves are so uneven."""
    only = ["contiguous_allgather"]
    result = ranks.run_ranks_bench(2048, rounds=1, dense=False, only=only, least_imbalance=1.3)
    assert set(result["median_ms"]) == {"balanced_a2a", "contiguous_allgather"}
    assert result["divisible_heads"] is None
    assert result["exposed_ms"] == {}
    seed = result["row"]["seed"]
    assert seed > 0
    uneven = [contiguous_imbalance(2048, tried) >= 1.3 for tried in range(seed + 1)]
    assert uneven == [False] * seed + [True]
    assert result["imbalance"]["contiguous_allgather"] == contiguous_imbalance(2048, seed)
    shown = printed(result)
    assert f"(seed {seed})" in shown
    assert "not run" not in shown


def contiguous_imbalance(tokens, seed):
    row = pack_row("sqlite3_doc", tokens, seed, longest=tokens // 4)
    return plan_step(row, 2, "contiguous", "allgather").imbalance


def printed(result):
    console = Console(file=io.StringIO(), width=100)
    print_ranks(result, console)
    return console.file.getvalue()


def test_unknown_contenders_and_rows_that_do_not_exist_are_refused(monkeypatch):
    monkeypatch.setattr(ranks, "SEEDS", 20)
    with pytest.raises(UnsupportedError, match=r"no contender rings: only= takes balanced_a2a"):
        ranks.run_ranks_bench(512, only=["rings"])
    with pytest.raises(PlanError, match=r"as uneven as 2\.1 on 2 ranks: lower least_imbalance"):
        ranks.run_ranks_bench(64, least_imbalance=2.1)


def test_results_that_differ_are_refused():
    good = [torch.ones(3)]
    assert largest_difference(good, good) == 0.0
    with pytest.raises(AssertionError, match=r"contenders differ by 5\.0e-01"):
        largest_difference([torch.tensor([1.0, 1.0, 0.5])], good)
    with pytest.raises(AssertionError, match="nan"):
        largest_difference([torch.tensor([float("nan")]), torch.ones(1)], [torch.ones(1)] * 2)
