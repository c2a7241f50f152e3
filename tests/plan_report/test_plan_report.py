"""longpack plan: what it reads, what it reports, what it draws."""

import json

import numpy as np
import pytest

from longpack import PackedRow, plan_step
from longpack.cli import main
from longpack.errors import RunError
from longpack.packing.window import pack_in_order
from longpack.plan import CostModel, LayerShape, Machine
from longpack.plan_report import (
    corpus_lengths,
    cost_model,
    file_lengths,
    load_documents,
    pack_rows,
    packing_effect,
    report,
    run_file_lengths,
)
from longpack.plan_report.exact import exact_gap
from longpack.plan_report.plot import plot_report

ROW = PackedRow.from_lengths([6000, 900, 400, 300, 200, 100, 100])


def line(found, name):
    return next(x for x in found.lines if x.name == name)


def test_every_line_is_what_its_plan_says():
    model = CostModel(LayerShape(num_heads=8, num_kv_heads=4), Machine(ranks_per_node=2))
    found = report([ROW], 4, model)
    for name in ("contiguous", "zigzag", "balanced:1.05"):
        plan, told = plan_step(ROW, 4, name, "a2a"), line(found, name)
        received = plan.received_bytes(4, 128, 2)
        assert told.imbalance == plan.imbalance
        assert (told.tokens_least, told.tokens_most) == (2000, 2000)
        assert told.received_bytes == np.mean(received)
        assert told.received_bytes_worst == max(received)
        assert told.segments == np.mean(plan.segment_count)
        cost = model.predict(plan.shards, plan.pieces, "a2a")
        assert told.step_ms == pytest.approx(1e3 * cost.step_s)
    assert line(found, "zigzag, allgather").received_bytes == 3 * 2000 * 2 * 4 * 128 * 2
    assert found.best.step_ms == min(x.step_ms for x in found.lines[:-2])
    assert f"layout={found.best.name!r}" in found.recommendation


def test_head_exchange_by_hand():
    """8 query and 4 K/V heads of 128 on 4 ranks: a rank gets 3/4 of 2000 rows of 24 heads."""
    machine = Machine(near_bytes_per_s=1e9, message_s=0.5, segment_s=0.0)
    model = CostModel(LayerShape(num_layers=3, num_heads=8, num_kv_heads=4), machine)
    told = line(report([ROW], 4, model), "head exchange")
    assert told.received_bytes == 2000 * 24 * 128 * 2 * 3 / 4
    assert told.exchange_ms == pytest.approx(1e3 * 3 * 2 * (told.received_bytes / 1e9 + 2 * 0.5))
    area_s = ROW.area / 4 * model.shape.pair_flops / machine.attention_flops_per_s
    assert told.attention_ms == pytest.approx(1e3 * 3 * area_s)


def test_head_exchange_is_left_out_with_the_reason():
    found = report([ROW], 3)
    assert (
        "32 query and 8 K/V heads do not both divide over 3 ranks"
        in found.left_out["head exchange"]
    )


def test_a_missed_tolerance_is_told(capsys):
    found = report([PackedRow.from_lengths([4])], 4)
    assert "no layout can do better than 1.600" in (line(found, "balanced:1.05").missed or "")
    assert line(found, "zigzag").missed is None
    assert main(["plan", "4", "--ranks", "4"]) == 0
    assert "balanced:1.2: the largest area is 1.600 times" in capsys.readouterr().out


def test_means_over_rows():
    rows = [ROW, PackedRow.from_lengths([2000] * 4)]
    one, two, both = (line(report(r, 4), "contiguous") for r in ([rows[0]], [rows[1]], rows))
    assert both.imbalance == pytest.approx((one.imbalance + two.imbalance) / 2)
    assert both.imbalance_worst == max(one.imbalance, two.imbalance)


def test_packs_are_full_seeded_and_capped():
    lengths = [5000, 40, 300, 7, 1200]
    rows = pack_rows(lengths, 4096, 3, seed=1, longest_tokens=2000)
    assert all(row.length == row.tokens == 4096 and max(row.lengths) <= 2000 for row in rows)
    assert rows == pack_rows(lengths, 4096, 3, seed=1, longest_tokens=2000)
    assert len(set(rows)) > 1
    with pytest.raises(RunError, match="no token"):
        pack_rows([0, 0], 10, 1)


def test_files_of_lengths(tmp_path):
    (tmp_path / "a.txt").write_text("10 20\n30, 40\n")
    (tmp_path / "b.json").write_text("[10, 20]")
    (tmp_path / "c.json").write_text('{"bins": [[1, 4], [100, 100]], "weights": [3, 1]}')
    (tmp_path / "bad.json").write_text('{"bins": 3}')
    assert file_lengths(tmp_path / "a.txt") == [10, 20, 30, 40]
    assert file_lengths(tmp_path / "b.json") == [10, 20]
    drawn = np.array(file_lengths(tmp_path / "c.json"))
    assert set(drawn.tolist()) == {1, 2, 3, 4, 100}
    assert np.mean(drawn == 100) == pytest.approx(0.25, abs=0.01)
    for name in ("bad.json", "none.txt"):
        with pytest.raises(RunError, match=r"does not hold document lengths"):
            file_lengths(tmp_path / name)


def test_corpora_are_tokenized_and_run_files_read(tmp_path):
    (tmp_path / "documents.jsonl").write_text('{"text": "four"}\n{"text": "sixsix"}\n')
    assert corpus_lengths([tmp_path / "documents.jsonl"]) == [5, 7]  # bytes and one end each
    (tmp_path / "run.toml").write_text(
        f"""
        [model.config]
        model_type = "llama"
        [data]
        paths = ["{tmp_path}/documents.jsonl"]
        row_length = 64
        document_length = 6
        [parallel]
        cp = 3
        [run]
        steps = 1
        folder = "run"
        """
    )
    assert run_file_lengths(tmp_path / "run.toml") == ([5, 6], 64, 3)
    documents = load_documents(str(tmp_path / "run.toml"))
    assert [row.length for row in documents.rows(None, 2)] == [64, 64]
    assert documents.ranks == 3


def test_sources(tmp_path):
    (tmp_path / "lengths.txt").write_text("30 20")
    assert load_documents("4,3,2").rows(None, 9) == [PackedRow.from_lengths([4, 3, 2])]
    assert [r.length for r in load_documents("sqlite3_doc").rows(4096, 1)] == [4096]
    assert load_documents(str(tmp_path / "lengths.txt")).lengths == [30, 20]
    with pytest.raises(RunError, match="neither lengths"):
        load_documents("nothing")


def test_rates_come_from_a_calibration(tmp_path):
    (tmp_path / "rates.json").write_text(
        json.dumps({"rates": {"attention_flops_per_s": 5.0, "near_bytes_per_s": 1.0}})
    )
    model = cost_model(LayerShape(), tmp_path / "rates.json", 300, 40, 4)
    assert model.machine.attention_flops_per_s == 5.0
    assert model.machine.near_bytes_per_s == 300e9
    assert model.machine.ranks_per_node == 4
    (tmp_path / "rates.json").write_text("{}")
    with pytest.raises(RunError, match="holds no rates"):
        cost_model(LayerShape(), tmp_path / "rates.json", 300, 40, 4)


def test_packing_in_windows_is_told_by_its_steps():
    """Two replicas, rows of 1000: in order one row is all long and one all short."""
    lengths = [1000, *[100] * 10, *[500] * 4] * 4
    model = CostModel()
    effect = packing_effect(lengths, 1000, 2, 2, 4, model, "contiguous")
    in_order = [
        max(step_ms(row.documents, model) for row in step)
        for step in pack_in_order(lengths, 1000, 2)
    ]
    assert effect.in_order_ms == pytest.approx(np.mean(in_order))
    assert effect.window_ms < effect.in_order_ms
    assert effect.cut_in_order == effect.cut_in_window == 0
    assert f"{effect.in_order_ms:.4g} ms" in str(effect)


def step_ms(row, model):
    plan = plan_step(row, 2, "contiguous", "a2a")
    return 1e3 * model.predict(plan.shards, plan.pieces, plan.kv_exchange).step_s


def test_the_picture_is_saved(tmp_path):
    pytest.importorskip("matplotlib")
    path = plot_report(report([ROW], 4), ROW, tmp_path / "out.png")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("lengths", "world_size", "best"), [([12], 2, 9), ([16, 5, 3], 2, 12), ([4, 4], 2, 0)]
)
def test_the_exact_optimum_of_small_rows(lengths, world_size, best):
    """Known by enumeration: the fewest received rows within 1.05 of the mean area."""
    pytest.importorskip("scipy")
    gap = exact_gap(PackedRow.from_lengths(lengths), world_size)
    assert gap.best_tokens == round(gap.bound_tokens) == best
    assert gap.found_tokens == best
    assert gap.grid_tokens == 1


def test_the_command_prints_a_table_and_json(capsys):
    assert main(["plan", "6000,900,400,300,200,100,100", "--ranks", "4"]) == 0
    shown = capsys.readouterr().out
    assert "balanced:1.05" in shown
    assert "Use layout=" in shown
    assert main(["plan", "6000,900,400,300,200,100,100", "--ranks", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["world_size"] == 4
    assert told["best"] in [x["name"] for x in told["lines"]]
    assert main(["plan", "nothing"]) == 2
