"""The torch-free C++ cores, under AddressSanitizer and UBSan."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
FLAGS = ["-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-pthread"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREADS = ["-fsanitize=thread"]


def find_cxx() -> str:
    cxx = shutil.which(os.environ.get("CXX", "c++"))
    if cxx is None:
        pytest.skip("no C++ compiler (set CXX)")
    return cxx


def build_and_run(
    source: Path, folder: Path, flags: list[str], sanitizers: list[str] = SANITIZE
) -> subprocess.CompletedProcess:
    """Build one driver and run it; skip where this compiler comes without the sanitizers' run time."""
    cxx, probe, program = find_cxx(), folder / "probe.cpp", folder / source.stem
    probe.write_text("int main() {}\n")
    if subprocess.run([cxx, *sanitizers, probe, "-o", folder / "probe"], capture_output=True).returncode:
        pytest.skip(f"this C++ compiler has no run time for {sanitizers[0]}")
    subprocess.run([cxx, *FLAGS, *sanitizers, *flags, f"-I{CSRC}", source, "-o", program], check=True)
    return subprocess.run([program], capture_output=True, text=True, timeout=300)


# Layers are what the others are made of, and take as long to compile as all of them: `test_layers` runs them once.
DRIVERS = sorted(path for path in HERE.glob("*.cpp") if path.stem != "layers")


@pytest.mark.parametrize("source", DRIVERS, ids=lambda path: path.stem)
def test_clean_under_sanitizers(source: Path, tmp_path: Path) -> None:
    done = build_and_run(source, tmp_path, ["-Werror"])
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_thread_sanitizer_sees_a_race(tmp_path: Path) -> None:
    source = tmp_path / "race.cpp"
    source.write_text(
        "#include <thread>\nint x;\nint main() { std::thread t([] { ++x; }); ++x; t.join(); return x - 2; }\n"
    )
    done = build_and_run(source, tmp_path, [], THREADS)
    assert done.returncode != 0
    assert "data race" in done.stderr


def test_sanitizers_see_a_fault(tmp_path: Path) -> None:
    """The gate itself: a driver that writes one byte too far must fail."""
    source = tmp_path / "fault.cpp"
    source.write_text("int main(int argc, char**) { char* p = new char[8]; p[7 + argc] = 1; return p[7 + argc]; }\n")
    done = build_and_run(source, tmp_path, [])
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr or "insufficient space" in done.stderr
