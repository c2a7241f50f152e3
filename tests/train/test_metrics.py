"""The metrics file survives kills; the traffic is counted right."""

import json

import pytest

from longpack import PackedRow
from longpack.errors import RunError
from longpack.train.config import ParallelSection
from longpack.train.metrics import MetricsFile, Traffic, read_metrics
from longpack.train.rows import Row


def row_of(*lengths):
    return Row(tokens=None, documents=PackedRow.from_lengths(lengths))


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
    shape, element, layers = (2, 8, 4), 4, 3
    token_bytes = 2 * (8 + 4) * 4 * 3
    parallel = ParallelSection(cp=2, kv_exchange="a2a")
    traffic = Traffic.of_step([row_of(6, 2)], parallel, shape, element, layers)
    assert traffic.kv_bytes_max == 4 * token_bytes
    assert traffic.kv_bytes_mean == 2 * token_bytes
    assert traffic.kv_bytes_gather == 4 * token_bytes
    areas = (1 + 2 + 3 + 4, 5 + 6 + 1 + 2)
    assert traffic.area_max_over_mean == max(areas) / (sum(areas) / 2)


def test_traffic_adds_rows_of_a_replica():
    parallel = ParallelSection(cp=1, dp=2)
    rows = [row_of(4), row_of(1, 3), row_of(4), row_of(2, 2)]
    traffic = Traffic.of_step(rows, parallel, (1, 8, 8), 4, 1)
    assert traffic.kv_bytes_max == traffic.kv_bytes_gather == 0
    assert traffic.area_max_over_mean == 20 / ((20 + 7 + 6) / 2)
