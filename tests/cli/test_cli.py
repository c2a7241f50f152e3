"""The command line: fast help, clean messages, exit codes, JSON."""

import json
import subprocess
import sys

import pytest
from tests.train.runs import write_documents

from longpack.cli import main
from longpack.train.demo import DEMOS, DemoReport, collect_documents, run_demo
from longpack.train.probe import BoundaryProbe

RUN_FILE = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
[data]
paths = ["documents"]
row_length = 96
[run]
steps = 2
folder = "run"
boundary_probe = true
"""


@pytest.fixture
def run_file(tmp_path):
    write_documents(tmp_path / "documents")
    (tmp_path / "run.toml").write_text(RUN_FILE)
    return tmp_path / "run.toml"


@pytest.mark.parametrize("command", [[], ["train"], ["demo"], ["bench"], ["bench", "attention"]])
def test_help_of_every_command(command, capsys):
    assert main([*command, "--help"]) == 0
    assert "Usage: longpack" in capsys.readouterr().out


def test_help_loads_no_torch():
    code = (
        "import sys; from longpack.cli import main; main(['train', '--help']); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_train_prints_a_summary(run_file, capsys):
    assert main(["train", str(run_file)]) == 0
    said = capsys.readouterr()
    assert "in 2 steps" in said.out
    assert "boundaries held" in said.out
    assert "12 documents, 96 tokens a row; LlamaForCausalLM" in said.err


def test_train_json_is_the_summary_alone(run_file, capsys):
    assert main(["train", str(run_file), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 2
    assert summary["probe"]["moved_outside"] == 0.0
    assert summary == json.loads((run_file.parent / "run" / "summary.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "requires an argument"),
        (["trian"], "Unknown command"),
        (["train", "none.toml"], "longpack: run file none.toml does not exist"),
        (["demo", "--model", "gpt5"], "gpt5"),
        (["demo", "--stepz", "3"], "stepz"),
    ],
)
def test_misuse_is_one_message_and_exit_2(arguments, said, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err + captured.out
    assert "Traceback" not in captured.err


def test_a_rank_says_which_it_is(run_file, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["train", str(run_file)]) == 2
    said = capsys.readouterr().err
    assert "longpack: rank 1 of 2 (world): parallel.cp = 1 times parallel.dp = 1 needs 1" in said


def test_a_missing_extra_is_named(capsys, monkeypatch, run_file):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (run_file.parent / "documents" / "a.parquet").write_bytes(b"")
    text = RUN_FILE.replace('"documents"]', '"documents/a.parquet"]')
    run_file.write_text(text)
    assert main(["train", str(run_file)]) == 2
    assert "pip install 'longpack[hf]'" in capsys.readouterr().err


def test_the_demo_refuses_a_folder_that_is_not_its_own(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("precious")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "exists and is no earlier demo" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize("name", DEMOS)
def test_the_demos_documents_are_real_and_short(name, tmp_path):
    longest = DEMOS[name].longest_file
    count, size = collect_documents(tmp_path / "documents", longest)
    files = list((tmp_path / "documents").iterdir())
    assert count == len(files) >= 50
    assert size == sum(f.stat().st_size for f in files)
    assert max(f.stat().st_size for f in files) <= longest
    assert (tmp_path / "documents" / "antigravity.py.txt").exists()


def test_the_demo_end_to_end(tmp_path, monkeypatch, capsys):
    """Two real launches of torchrun, on few short rows."""
    import dataclasses

    tiny = dataclasses.replace(DEMOS["tiny"], row_length=2048, longest_file=1500)
    monkeypatch.setitem(DEMOS, "tiny", tiny)
    out = tmp_path / "demo"
    assert main(["demo", "--steps", "3", "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["good"]
    assert len(report["losses_cp1"]) == len(report["losses_cp2"]) == 3
    pairs = zip(report["losses_cp1"], report["losses_cp2"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-5
    assert report["probe"]["moved_outside"] == 0.0
    assert 0 < report["kv_bytes_max"] <= report["kv_bytes_gather"]
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")


def report_of(**changes):
    probe = BoundaryProbe(1, 10, 20, 3, moved_inside=2.0, moved_outside=0.0)
    fields = {
        "about": "a model",
        "folder": "out",
        "plot": "out/losses.png",
        "losses_cp1": [5.0, 4.0],
        "losses_cp2": [5.0, 4.000001],
        "tokens_per_s_cp1": 10.0,
        "tokens_per_s_cp2": 20.0,
        "kv_bytes_mean": 1.0,
        "kv_bytes_max": 2.0,
        "kv_bytes_gather": 3.0,
        "probe": probe,
    }
    return DemoReport(**{**fields, **changes})


def test_a_finding_is_exit_1(monkeypatch, capsys):
    import longpack.train.demo as demo

    leak = BoundaryProbe(1, 10, 20, 3, moved_inside=2.0, moved_outside=0.5)
    for changes, code in (({}, 0), ({"losses_cp2": [5.0, 4.1]}, 1), ({"probe": leak}, 1)):
        monkeypatch.setattr(demo, "run_demo", lambda *a, c=changes, **k: report_of(**c))
        assert main(["demo"]) == code
        said = capsys.readouterr().out
        assert ("the two runs differ or documents leak" in said) == bool(code)
        assert "5.000000" in said


def test_a_failed_run_of_the_demo_is_said(tmp_path, monkeypatch):
    import dataclasses

    from longpack.errors import RunError

    wrong = dataclasses.replace(DEMOS["tiny"], model={"config": {"model_type": "lama"}})
    monkeypatch.setitem(DEMOS, "tiny", wrong)
    with pytest.raises(RunError, match=r"1 ranks ended with exit code 1"):
        run_demo("tiny", 1, tmp_path / "demo")
