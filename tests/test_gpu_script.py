"""``gpu.sh`` on a machine without a GPU: it says so and touches nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.sh"


def test_is_valid_shell() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    assert os.access(SCRIPT, os.X_OK)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_stops_at_once(tmp_path) -> None:
    out, environment = tmp_path / "out", os.environ | {"PYTHON": sys.executable}
    before = sorted(SCRIPT.parent.rglob("*"))
    done = subprocess.run([SCRIPT], env=environment | {"OUT": str(out)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "gpu.sh: no GPU that torch can use; nothing was run, nothing was written\n"
    assert not done.stdout
    assert not out.exists()
    assert sorted(p for p in SCRIPT.parent.rglob("*") if "__pycache__" not in p.parts) == [
        p for p in before if "__pycache__" not in p.parts
    ]


def test_without_torch_it_says_what_to_do(tmp_path) -> None:
    done = subprocess.run([SCRIPT], env=os.environ | {"PYTHON": "false"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "make setup" in done.stderr
