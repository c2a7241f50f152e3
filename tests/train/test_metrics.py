"""The metrics file survives kills; the traffic is counted right."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from longpack import PackedRow, plan_step
from longpack.errors import RunError
from longpack.train.metrics import MetricsFile, Traffic, loads_of, read_metrics
from longpack.train.model import kv_token_bytes


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


def test_traffic_by_hand():
    """Documents [6, 2] over two ranks: rank 1 needs the 4 rows before it, rank 0 none."""
    token_bytes = 2 * (8 + 4) * 4 * 3
    traffic = Traffic.of_loads(loads_of([plan_of(6, 2, cp=2)]), token_bytes)
    assert traffic.kv_bytes_max == 4 * token_bytes
    assert traffic.kv_bytes_mean == 2 * token_bytes
    assert traffic.kv_bytes_gather == 4 * token_bytes
    areas = (1 + 2 + 3 + 4, 5 + 6 + 1 + 2)
    assert traffic.area_max_over_mean == max(areas) / (sum(areas) / 2)


def test_traffic_adds_rows_of_a_replica():
    replicas = [[plan_of(4), plan_of(4)], [plan_of(1, 3), plan_of(2, 2)]]
    loads = np.concatenate([loads_of(plans) for plans in replicas], axis=1)
    traffic = Traffic.of_loads(loads, 64)
    assert traffic.kv_bytes_max == traffic.kv_bytes_gather == 0
    assert traffic.area_max_over_mean == 20 / ((20 + 7 + 6) / 2)
    assert traffic.attention_waste == pytest.approx(1 - 16.5 / 20)


def test_a_row_of_padding_wastes_nothing():
    row = PackedRow.from_lengths([], padding=8)
    traffic = Traffic.of_loads(loads_of([plan_step(row, 2)]), 64)
    assert (traffic.area_max_over_mean, traffic.attention_waste) == (1.0, 0.0)


def test_bytes_of_a_token_are_of_the_heads_that_attention_is_given():
    """3 layers, bf16: grouped heads hold 2 heads of 8; latent ones 4 heads of (8 + 4) and 6."""
    common = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    grouped = transformers.LlamaConfig(**common, num_key_value_heads=2)
    latent = transformers.DeepseekV3Config(
        **common, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
    )
    for config, numbers in ((grouped, 2 * 2 * 8), (latent, 4 * (8 + 4 + 6))):
        model = SimpleNamespace(config=config, dtype=torch.bfloat16)
        assert kv_token_bytes(model) == numbers * 2 * 3
