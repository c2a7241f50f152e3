"""The tests can fail: break the code on purpose, one line at a time, and expect red.

Each case replaces one piece of text in a copy of the package and runs the test that guards it.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Breakage:
    """Replace `old` by `new` in `file`; `test` must then fail."""

    file: str
    old: str
    new: str
    test: str


BREAKAGES = {
    "a_target_crosses_documents": Breakage(
        "loss/targets.py",
        "inside[start : stop - 1] = True",
        "inside[start:stop] = True",
        "tests/loss/test_loss.py -k cross",
    ),
    "a_needed_row_is_not_sent": Breakage(
        "plan/transfers.py",
        "end = np.minimum(pieces.stop[pair_piece], stop[pair_need])",
        "end = np.minimum(pieces.stop[pair_piece] - 1, stop[pair_need])",
        "tests/plan/test_plan.py -k dangerous",
    ),
    "gradients_from_two_ranks_overwrite_each_other": Breakage(
        "collectives/exchange.py",
        "total.index_add_(",
        "total.index_copy_(",
        "tests/collectives/test_exchange.py -k transpose",
    ),
    "the_open_step_is_trusted_in_a_recompute": Breakage(
        "blockdiag_cp/carry.py",
        "if not is_recomputing():",
        "if True:",
        "tests/blockdiag_cp/test_attention.py -k never_trusts",
    ),
    "earlier_keys_of_a_document_are_lost": Breakage(
        "kernels/tiles.py",
        "        if prefix:",
        "        if False:",
        "tests/kernels/test_kernels.py -k straddle",
    ),
    "keys_that_arrive_are_not_merged": Breakage(
        "kernels/tiles.py",
        "k_stop - k_start, False, True)",
        "k_stop - k_start, False, False)",
        "tests/blockdiag_cp/test_attention.py -k single_document",
    ),
    "arrivals_are_read_in_the_wrong_order": Breakage(
        "collectives/staged.py",
        "elif stage.reading is not None:",
        "elif False:",
        "tests/blockdiag_cp/test_overlap.py -k 'any_number and long-zigzag'",
    ),
    "merged_pieces_take_the_wrong_weights": Breakage(
        "kernels/merge.py",
        "torch.logaddexp(",
        "torch.maximum(",
        "tests/kernels -k merge",
    ),
    "gradients_that_come_home_are_forgotten": Breakage(
        "blockdiag_cp/overlap.py",
        "        add_home(total, self.route, came_home)\n",
        "",
        "tests/blockdiag_cp/test_attention.py -k single_document",
    ),
    "kept_kv_of_another_call_are_taken": Breakage(
        "blockdiag_cp/kept.py",
        "or self._rows[self._at][0] is not staged",
        "",
        "tests/blockdiag_cp/test_operator.py -k another_call",
    ),
    "a_window_is_ignored": Breakage(
        "integrations/huggingface/attention.py",
        "if value >= longest:",
        "if True:",
        "tests/integrations/test_huggingface.py -k 'not_honoured and mistral'",
    ),
    "ranks_with_different_rows_go_on": Breakage(
        "blockdiag_cp/agreement.py",
        "if difference is not None:",
        "if False:",
        "tests/blockdiag_cp/test_batch.py -k different",
    ),
    "a_replay_decides_again": Breakage(
        "recompute_replay/channel.py",
        'if mode == "replay":',
        "if False:",
        "tests/recompute_replay/test_decide.py",
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_broken_code_is_caught(name, tmp_path):
    breakage = BREAKAGES[name]
    package = tmp_path / "longpack"
    shutil.copytree(ROOT / "src/longpack", package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / breakage.file
    text = file.read_text(encoding="utf-8")
    assert breakage.old in text, f"{breakage.file} no longer holds {breakage.old!r}"
    file.write_text(text.replace(breakage.old, breakage.new), encoding="utf-8")
    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {breakage.test}"
    run = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, (
        f"exit {run.returncode}, expected a failing test:\n{run.stdout[-2000:]}"
    )
