"""The GPU check, run with the CPU kernel, so that the script works when a GPU is at hand."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_cpu_run_passes_and_writes_results(gpu_check, tmp_path, capsys):
    output = tmp_path / "results.json"
    assert gpu_check.main(["--cpu", "--quick", "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert results["command"] == f"gpu_check.py --cpu --quick --output {output}"
    assert results["machine"]["packages"]["torch"]
    cases = {p["case"].split()[0] + p["case"].split("of")[1] for p in results["parity"]}
    worlds = {f"{layout} {n}" for n in (2, 4, 8) for layout in ("contiguous", "zigzag")}
    assert cases == {"contiguous 1"} | worlds
    assert all(p["kernel"] == "flash_cpu" and p["passed"] for p in results["parity"])
    assert len(results["timing"]) == len(cases)
    assert set(results["not_run"]) == {"flash_attn", "flash_torch_cuda", "te"}
    printed = capsys.readouterr().out
    assert "Parity" in printed
    assert "not run: te" in printed


@pytest.mark.usefixtures("one_thread")
def test_a_wrong_kernel_fails_the_check(gpu_check, monkeypatch):
    """Attention that forgets its last segment must not pass."""
    segments = gpu_check.Segments(((0, 20, 0, 30), (20, 32, 30, 42)), 32, 42)
    original = gpu_check.attend

    def forgetful(kernel, query, key, value, segments):
        out = original(kernel, query, key, value, segments)
        if kernel == "dense":
            return out
        return torch.cat([out[:20], torch.zeros_like(out[20:])])

    arguments = ("flash_cpu", "case", segments, (4, 2, 8, 8), torch.float32, "cpu")
    assert gpu_check.check_parity(*arguments).passed
    monkeypatch.setattr(gpu_check, "attend", forgetful)
    assert not gpu_check.check_parity(*arguments).passed


def test_without_cuda_it_says_so(gpu_check, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "results.json"
    assert gpu_check.main(["--output", str(output)]) == 2
    assert "no CUDA device" in capsys.readouterr().out
    assert not output.exists()
