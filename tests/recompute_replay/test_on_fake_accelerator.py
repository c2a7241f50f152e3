"""Every recompute case again with backward on a device thread, in a process of its own."""

import subprocess
import sys
from pathlib import Path


def test_device_cases_pass_in_their_own_process() -> None:
    cases = Path(__file__).with_name("device_cases.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(cases)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout
