"""Run files: what is accepted, and what each fault says."""

import pytest
from tests.train.runs import run_text

from longpack.errors import RunError
from longpack.train import load_config
from longpack.train.config import parse_config


def faults_of(tmp_path, **sections):
    with pytest.raises(RunError) as caught:
        parse_config(run_text(tmp_path, **sections), tmp_path)
    return str(caught.value)


def test_defaults_and_synonyms(tmp_path):
    config = parse_config(run_text(tmp_path, parallel={"kv_exchange": "All-To-All"}), tmp_path)
    assert config.parallel.kv_exchange == "a2a"
    assert config.parallel.attn_backend == "flash"
    assert config.data.paths == [tmp_path / "documents"]
    assert config.run.folder == tmp_path / "run"
    assert config.rows_per_step == 2


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"row_lenght": 3}}, "data.row_lenght is unknown; accepted here: paths, suffix"),
        ({"data": {"row_length": -3}}, "data.row_length = -3: "),
        ({"parallel": {"layout": "spiral"}}, "one of contiguous, head_tail, zigzag"),
        ({"parallel": {"kv_exchange": "pigeon"}}, "kv_exchange='pigeon' is unknown; it is one of"),
        ({"parallel": {"attn_backend": "x"}}, "attn_backend='x' is unknown; it is one of auto"),
        ({"model": {"dtype": "int8"}}, "model.dtype = 'int8': Input should be 'float32'"),
        ({"model": {"name": "smollm2"}}, "exactly one of name"),
        ({"model": {"config": {"hidden_size": 3}}}, "config needs a model_type"),
        ({"parallel": {"dp": 3}}, "rows_per_step = 2 rows cannot be dealt evenly"),
        ({"data": {"on_bad_file": "ignore"}}, "'skip' or 'refuse'"),
    ],
)
def test_each_fault_names_field_value_and_what_is_accepted(tmp_path, sections, said):
    assert said in faults_of(tmp_path, **sections)


def test_all_faults_are_listed(tmp_path):
    said = faults_of(tmp_path, data={"row_length": 1}, optimizer={"lr": 0.0})
    assert said.startswith("run: 2 faults")
    assert "data.row_length = 1" in said
    assert "optimizer.lr = 0.0" in said


def test_missing_section_and_field(tmp_path):
    text = run_text(tmp_path)
    del text["model"], text["data"]["paths"]
    with pytest.raises(RunError, match=r"2 faults\n  model is missing\n  data\.paths is missing"):
        parse_config(text, tmp_path)


def test_missing_file_and_bad_toml(tmp_path):
    with pytest.raises(RunError, match="does not exist"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(RunError, match="not valid TOML"):
        load_config(tmp_path / "bad.toml")


def test_the_examples_are_accepted():
    for name in ("tiny", "tiny_two_ranks", "smollm2"):
        load_config(f"examples/{name}.toml")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr = inf: "),
        ({"run": {"seed": -1}}, "run.seed = -1: "),
        ({"run": {"seed": 10**5000}}, "run.seed = <int>: "),
        ({"run": {"folder": "a\0b"}}, "no path holds a zero byte"),
        ({"parallel": {"layout": "balanced:nan"}}, "a number of at least 1"),
    ],
)
def test_values_that_would_fail_later(tmp_path, sections, said):
    assert said in faults_of(tmp_path, **sections)


@pytest.mark.parametrize("text", ["x = " + "[" * 10_000, "x = " + "1" * 5000, "x = 1\0"])
def test_files_that_no_parser_takes(tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(RunError, match="is not valid TOML"):
        load_config(tmp_path / "run.toml")
    with pytest.raises(RunError, match="cannot be read"):
        load_config(tmp_path)
