"""What is built, what is skipped and what fails: ``SPECDEC_BUILD`` and the compilers setup.py finds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[1] / "setup.py"
pytestmark = pytest.mark.skipif(not SETUP.exists(), reason="no setup.py beside the tests (installed from a wheel)")


def run_setup(**environment: str) -> subprocess.CompletedProcess:
    """Let setup.py decide what to build, without building it."""
    env = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH", "CXX")}
    command = [sys.executable, SETUP.name, "--version"]
    return subprocess.run(command, env={**env, **environment}, cwd=SETUP.parent, capture_output=True, text=True)


def notices(done: subprocess.CompletedProcess) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("specdec-kernels: ")]


def test_none_builds_nothing() -> None:
    done = run_setup(SPECDEC_BUILD="none")
    assert done.returncode == 0
    assert notices(done) == ["specdec-kernels: native kernels skipped: SPECDEC_BUILD=none"]


def test_auto_says_in_one_line_what_it_skips() -> None:
    done = run_setup(SPECDEC_BUILD="auto", CXX="no-such-compiler", PATH="")
    assert done.returncode == 0
    assert notices(done) == [
        "specdec-kernels: skipping specdec_kernels._C: no C++ compiler was found (set CXX)",
        "specdec-kernels: skipping specdec_kernels._C_cuda: nvcc was not found (set CUDA_HOME)",
    ]


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("cpu", "SPECDEC_BUILD=cpu: cannot build specdec_kernels._C: no C++ compiler was found (set CXX)"),
        ("gpu", "SPECDEC_BUILD must be auto, cpu, cuda or none, got 'gpu'"),
    ],
)
def test_explicit_values_fail_loudly(mode: str, message: str) -> None:
    done = run_setup(SPECDEC_BUILD=mode, CXX="no-such-compiler", PATH="")
    assert done.returncode != 0
    assert message in done.stderr


def test_cuda_needs_nvcc(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.touch(mode=0o755)
    done = run_setup(SPECDEC_BUILD="cuda", PATH=str(tmp_path))
    assert done.returncode != 0
    assert "cannot build specdec_kernels._C_cuda: nvcc was not found (set CUDA_HOME)" in done.stderr
