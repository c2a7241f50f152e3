"""`longpack bench ranks`: contenders agree before they are timed, and every figure is there."""

import io

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from longpack import PackedRow, plan_step
from longpack.bench import ranks
from longpack.bench.contenders import TOLERANCE, largest_difference, require_equal
from longpack.bench.lengths import pack_row
from longpack.bench.rivals import Ring, Ulysses
from longpack.cli import main
from longpack.cli.bench_ranks import print_ranks
from longpack.collectives import Loopback
from longpack.errors import PlanError, ResultError, UnsupportedError
from longpack.verify.oracle import oracle_attention

ROW = PackedRow.from_lengths([30, 5, 1, 60, 24])
NAN = float("nan")


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
    assert result["largest_difference"] < TOLERANCE
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
    differences = {
        "right": largest_difference(good, good),
        "half": largest_difference([torch.tensor([1.0, 1.0, 0.5])], good),
        "odd": largest_difference([torch.ones(1), torch.tensor([NAN])], [torch.ones(1)] * 2),
    }
    assert differences == {"right": 0.0, "half": 0.5, "odd": pytest.approx(NAN, nan_ok=True)}
    assert require_equal({"right": 0.0, "nearly": TOLERANCE}) == TOLERANCE
    with pytest.raises(ResultError, match=r"contenders differ: half by 5\.0e-01, odd by nan, rel"):
        require_equal(differences)


def test_every_rank_knows_the_differences_of_all():
    """Rank 1 is wrong by 1 in 4; what runs on one process is compared by rank 0 alone."""
    plan = plan_step(ROW, 2, "contiguous", "a2a")
    expected = [torch.full((1, ROW.length, 1, 1), 4.0)]

    def body(t):
        shard = torch.full((1, plan.local_length, 1, 1), 4.0 + t.rank)
        runs = {
            "split": ranks.Contender(lambda: [shard], plan),
            "whole": ranks.Contender(lambda: expected, None),
        }
        return ranks._differences(runs, expected, t)

    found = {"split on rank 0": 0.0, "whole on rank 0": 0.0, "split on rank 1": 0.25}
    assert Loopback(2).run(body) == [found, found]


def test_nobody_times_where_results_differ(monkeypatch):
    wrong = {"ring on rank 1": 0.5}
    monkeypatch.setattr(ranks, "_differences", lambda *arguments: wrong)
    monkeypatch.delattr(ranks, "_time")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = ranks._compete(0, 1, ROW, ranks.Pass((9, 3), ("balanced_a2a",), rounds=1))
    finally:
        dist.destroy_process_group()
    assert found == {"differences": wrong, "not_run": {}}


def test_results_that_differ_on_ranks_are_a_finding(monkeypatch, capsys):
    class Wrong:
        alive = True

        def run(self, *arguments, **options):
            return [{"differences": {"ring on rank 1": 0.5}, "not_run": {}}] * 2

        def kill(self):
            self.alive = False

    world = Wrong()
    monkeypatch.setattr(ranks.World, "start", lambda *arguments, **options: world)
    assert main(["bench", "ranks", "--tokens", "256"]) == 1
    assert "longpack: contenders differ: ring on rank 1 by 5.0e-01" in capsys.readouterr().err
    assert not world.alive
