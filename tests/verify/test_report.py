"""The report in its three forms, its exit codes, and ranks that are processes."""

import json
import re

import pytest
import torch.distributed as dist
from tests.verify.patients import Patient, StockAttention, TakesNoStep
from tests.verify.test_faults import found, patient

from longpack.cli import main
from longpack.errors import UnsupportedError
from longpack.verify import CHECKS, verify_model, write_page
from longpack.verify.page import QUESTIONS
from longpack.verify.pictures import layer_of


def odd_layer():
    return patient(attention=StockAttention())


def test_the_page_holds_everything_and_needs_nothing(tmp_path):
    report = verify_model(odd_layer())
    page = write_page(report, tmp_path / "out.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert not re.search(r'(src|href)="http', page)
    assert f"{len(report.findings)} findings" in page
    for finding in report.findings:
        assert finding.where in page
    assert page.count("&#10007; finding") == sum(bool(r.findings) for r in report.results)


def test_every_check_has_its_question():
    assert list(QUESTIONS) == list(CHECKS)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.self_attn.q_proj.weight", "layers.11"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("scale", "scale"),
        ("blocks.0.0.weight", "blocks.0"),
    ],
)
def test_parameters_are_grouped_by_layer(name, layer):
    assert layer_of(name) == layer


def test_exit_codes_and_json(tmp_path, capsys):
    good = ["verify", "--model", "tests.verify.patients:Patient", "--json"]
    assert main([*good, "--only", "coverage", "--only", "boundary"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["good"] is True
    assert [r["name"] for r in told["results"]] == ["coverage", "boundary"]
    assert told["results"][1]["data"]["lengths"] == [37, 1, 24, 50, 16]
    bad = ["verify", "--model", "tests.verify.test_report:odd_layer", "--only", "coverage"]
    assert main([*bad, "--html", str(tmp_path / "a.html")]) == 1
    assert "blocks.1.attention" in capsys.readouterr().out
    assert (tmp_path / "a.html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt5"], "nothing is downloaded"),
        (["--model", "tests.verify.patients:Patient", "--only", "taste"], "'taste' is not one of"),
        (["--model", "tests.verify.patients:Patient", "--layout", "spiral"], "spiral"),
        (["--model", "tests.verify.patients:Patient", "--exchange", "pigeon"], "pigeon"),
        ([], "--model"),
    ],
)
def test_misuse_is_one_message_and_exit_2(arguments, said, capsys):
    assert main(["verify", *arguments]) == 2
    told = capsys.readouterr()
    assert said in told.err + told.out
    assert "Traceback" not in told.err


def test_an_unknown_check_is_named():
    with pytest.raises(UnsupportedError, match="only='taste'"):
        verify_model(Patient(), only=["taste"])


def verify_as_rank(rank, world_size):
    reports = [
        verify_model(model, cp_mesh=dist.group.WORLD, kv_exchange="a2a", checkpointing="as_is")
        for model in (Patient(), TakesNoStep(), odd_layer())
    ]
    return [r.to_dict()["good"] for r in reports], reports[2]


def test_ranks_that_are_processes_give_the_same_report(on_ranks):
    (good, report), (same, other) = on_ranks(verify_as_rank, world_size=2)
    assert good == same == [True, True, False]
    assert report.findings == other.findings
    found(report, "coverage", r"^blocks\.1\.attention$")
    threads = verify_model(odd_layer(), kv_exchange="a2a", checkpointing="as_is")
    assert [f.kind for f in threads.findings] == [f.kind for f in report.findings]
