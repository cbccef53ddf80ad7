"""The sanitizer driver of tree attention on the vector instruction sets; `test_native` runs the plain one."""

from pathlib import Path

import pytest

from specdec_kernels import _native

from .test_native import CSRC, build_and_run

SOURCE = Path(__file__).parent / "tree_attention.cpp"
AVX512 = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
FLAGS = {
    "avx2": AVX512[:3],
    "avx512_bf16": [*AVX512, "-mavx512bf16", "-Wno-maybe-uninitialized", "-Wno-uninitialized"],
}


# The last level includes the code of the one before; avx2 is slow to compile twice.
@pytest.mark.parametrize("isa", [pytest.param("avx2", marks=pytest.mark.slow), "avx512_bf16"])
def test_clean_under_sanitizers(isa: str, tmp_path: Path) -> None:
    native = _native.native_module()
    if native is None or isa not in native.cpu_isa().split():
        pytest.skip(f"this machine is not known to run {isa}")
    assert (CSRC / "cpu" / isa / "tree_attention.cpp").exists()
    # Without optimisation it compiles in half the time, and still runs in seconds.
    done = build_and_run(SOURCE, tmp_path, ["-O0", "-Werror", "-g0", "-ffp-contract=off", *FLAGS[isa]])
    assert done.returncode == 0, done.stdout + done.stderr
