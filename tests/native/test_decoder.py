"""The sanitizer driver of norm and rotation on the vector instruction sets; `test_native` runs the plain one."""

from pathlib import Path

import pytest

from specdec_kernels import _native

from .test_native import build_and_run
from .test_tree_attention import FLAGS

SOURCE = Path(__file__).parent / "decoder.cpp"


@pytest.mark.parametrize("isa", FLAGS)
def test_clean_under_sanitizers(isa: str, tmp_path: Path) -> None:
    native = _native.native_module()
    if native is None or isa not in native.cpu_isa().split():
        pytest.skip(f"this machine is not known to run {isa}")
    done = build_and_run(SOURCE, tmp_path, ["-Werror", "-g0", "-ffp-contract=off", *FLAGS[isa]])
    assert done.returncode == 0, done.stdout + done.stderr
