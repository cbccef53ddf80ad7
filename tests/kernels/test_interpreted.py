"""Run the interpreter's tests in a process of their own: Triton decides at its import whether to interpret."""

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "interpret"


def test_interpreted_kernels() -> None:
    """Every test in ``interpret/`` passes, none is skipped. To run them alone: ``TRITON_INTERPRET=1 pytest`` there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in", done.stdout, re.MULTILINE), done.stdout[-500:]
