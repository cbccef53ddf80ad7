"""``gpu.sh``: without a GPU it says so and touches nothing; with one, as far as stubs can tell, it runs everything."""

import os
import shutil
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


PYTHON = """#!/bin/sh
case "$*" in
  *get_device_name*) echo "Stub GPU" ;;
  *import*) ;;
  *pytest*) echo "tests: $*" ;;
  *bench*$BROKEN*) echo "cannot"; exit 3 ;;
  *) echo "{}" > "benchmarks/results/stub-gpu/$4.jsonl" ;;
esac
"""
TIMEOUT = """#!/bin/sh
echo "$2" >> "$LIMITS"
shift 2
exec "$@"
"""


def run_with_stubs(folder: Path, broken: str) -> subprocess.CompletedProcess:
    """Run a copy of the script beside three benchmarks, in a world where all it calls are these stubs."""
    for name, text in {"python": PYTHON, "timeout": TIMEOUT, "compute-sanitizer": "#!/bin/sh\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "benchmarks").mkdir()
    shutil.copy(SCRIPT, folder / "benchmarks")
    for op in ("one", "three", "two"):
        (folder / "benchmarks" / f"bench_{op}.py").touch()
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": str(folder / "python"), "BROKEN": broken}
    environment |= {"OUT": str(folder / "out"), "LIMITS": str(folder / "limits")}
    return subprocess.run(
        [folder / "benchmarks" / "gpu.sh"], env=environment, capture_output=True, text=True, timeout=60
    )


def test_with_a_gpu_it_runs_everything_within_its_limit(tmp_path) -> None:
    done = run_with_stubs(tmp_path, broken="nothing")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = ("tests", "sanitizer", "bench_one", "bench_three", "bench_two")
    assert [line.split()[1] for line in done.stdout.splitlines() if "passed" in line] == [f"{part}:" for part in parts]
    assert "tests: -m pytest -q -n 8 -m gpu tests" in (tmp_path / "out" / "tests.log").read_text()
    assert {f"{part}.log" for part in parts} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / "three.jsonl").read_text() == "{}\n"
    assert sum(map(int, (tmp_path / "limits").read_text().split())) <= 600


def test_a_part_that_fails_does_not_stop_the_next(tmp_path) -> None:
    done = run_with_stubs(tmp_path, broken="three")
    assert done.returncode == 1
    assert done.stdout.endswith("failed: bench_three\n")
    assert "== bench_three: failed (3)" in done.stdout
    assert (tmp_path / "out" / "two.jsonl").exists()
