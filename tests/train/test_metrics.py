"""The metrics file survives kills; the traffic is counted right."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MixtralConfig

from longpack import PackedRow, plan_step
from longpack.errors import RunError
from longpack.plan import LayerShape
from longpack.train.metrics import MetricsFile, Traffic, loads_of, read_metrics
from longpack.train.model import layer_shape


def plan_of(*lengths, cp=1):
    return plan_step(PackedRow.from_lengths(lengths), cp, kv_exchange="a2a")


def test_resuming_cuts_later_steps_and_torn_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": n, "loss": n / 2, "tokens_per_s": 1.0}) + "\n" for n in (1, 2, 3)]
    path.write_text("".join(lines) + '{"step": 4, "lo')
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    MetricsFile(path, step=2).close()
    assert path.read_text() == "".join(lines[:2])


def test_a_damaged_line_is_named_where_it_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": n, "loss": n / 2, "tokens_per_s": 1.0}) for n in (1, 2, 3)]
    damages = ("", lines[1][:9], "[2]", '{"step": 2}', "\0" * 40, lines[2], lines[1] * 2)
    for damage in damages:
        path.write_text("\n".join([lines[0], damage, lines[2], ""]))
        with pytest.raises(RunError, match=r"metrics.jsonl is damaged, line 2 .* Restore it"):
            read_metrics(path)
        with pytest.raises(RunError, match="line 2"):
            MetricsFile(path, step=3)
        MetricsFile(path, step=1).close()  # later lines are cut unread: their steps run again
        assert path.read_text() == lines[0] + "\n"
    with pytest.raises(RunError, match="ends at step 1 and the checkpoint is of step 2"):
        MetricsFile(path, step=2)


SHAPE = LayerShape(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6, linear_parameters=70)


def test_traffic_by_hand():
    """Documents [6, 2] over two ranks: rank 1 needs the 4 rows before it, rank 0 none."""
    token_bytes = 2 * 2 * 6 * 2 * 3
    traffic = Traffic.of_loads(loads_of([plan_of(6, 2, cp=2)]), SHAPE)
    assert traffic.kv_bytes_max == 4 * token_bytes
    assert traffic.kv_bytes_mean == 2 * token_bytes
    assert traffic.kv_bytes_gather == 4 * token_bytes
    areas = (1 + 2 + 3 + 4, 5 + 6 + 1 + 2)
    assert traffic.area_max_over_mean == max(areas) / (sum(areas) / 2)
    pair, token = 4 * 4 * 6 * (1 + 2.5), 2 * 70 * 3
    done = [area * pair + 4 * token for area in areas]
    assert traffic.step_waste == pytest.approx(1 - sum(done) / 2 / max(done), rel=1e-12)


def test_traffic_adds_rows_of_a_replica():
    replicas = [[plan_of(4), plan_of(4)], [plan_of(1, 3), plan_of(2, 2)]]
    loads = np.concatenate([loads_of(plans) for plans in replicas], axis=1)
    traffic = Traffic.of_loads(loads, replace(SHAPE, linear_parameters=0))
    assert traffic.kv_bytes_max == traffic.kv_bytes_gather == 0
    assert traffic.area_max_over_mean == 20 / ((20 + 7 + 6) / 2)
    assert traffic.step_waste == pytest.approx(1 - 16.5 / 20, rel=1e-12)


def test_ranks_wait_in_every_row():
    """Rank 1 is the busiest of one row and rank 0 of the other: even in sum, yet both wait."""
    late, early = plan_of(2, 6, cp=2), plan_of(4, 2, 2, cp=2)
    assert (late.area, early.area) == ((6, 18), (10, 6))
    loads = loads_of([late, early])
    assert loads.tolist()[:3] == [[16, 24], [28, 28], [8, 8]]
    traffic = Traffic.of_loads(loads, replace(SHAPE, linear_parameters=0))
    assert traffic.step_waste == pytest.approx(1 - 20 / 28, rel=1e-12)


def test_a_row_of_padding_wastes_nothing():
    loads = loads_of([plan_step(PackedRow.from_lengths([], padding=8), 2)])
    for shape in (SHAPE, replace(SHAPE, linear_parameters=0)):
        traffic = Traffic.of_loads(loads, shape)
        assert (traffic.area_max_over_mean, traffic.step_waste) == (1.0, 0.0)


COMMON = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def shape_of(kind, recompute=False, **fields):
    model = AutoModelForCausalLM.from_config(kind(**{**COMMON, **fields}), dtype=torch.bfloat16)
    return layer_shape(model, recompute)


def test_the_shape_of_grouped_heads():
    """Linear weights: query and output, key and value, three of the MLP, a share of the output."""
    attention, mlp, norms = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 64, 2 * 32
    for tied in (False, True):
        shape = shape_of(LlamaConfig, recompute=True, tie_word_embeddings=tied)
        ends = (50 * 32 + 32) // 2
        expected = LayerShape(2, 4, 2, 8, attention + mlp + norms + ends, 2, True)
        assert shape == expected


def test_the_shape_of_latent_heads_is_what_attention_is_given():
    """4 heads, each with keys of 8 + 4 numbers and values of 6."""
    latent = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    shape = shape_of(DeepseekV3Config, **latent)
    assert shape.kv_bytes == 4 * (8 + 4 + 6) * 2
    assert shape.pair_flops == 2 * 4 * (8 + 4 + 6) * 3.5


def test_experts_that_a_token_does_not_visit_cost_it_nothing():
    one, more = ({"num_local_experts": e, "num_experts_per_tok": k} for e, k in ((2, 2), (8, 2)))
    router = 32 * (8 - 2)
    shapes = [shape_of(MixtralConfig, **fields).linear_parameters for fields in (one, more)]
    assert shapes[1] - shapes[0] == router
