"""The sanitizer drivers of whole layers, under ThreadSanitizer, too, on the best instruction set that there is.

What is tried here is how stages follow each other, which no instruction set changes; their kernels have own drivers.
"""

from pathlib import Path

import pytest

from specdec_kernels import _native

from .test_native import SANITIZE, THREADS, build_and_run
from .test_tree_attention import FLAGS

SOURCE = Path(__file__).parent / "layers.cpp"


@pytest.mark.parametrize("sanitizers", [SANITIZE, THREADS], ids=["memory", "threads"])
def test_clean_under_sanitizers(sanitizers: list[str], tmp_path: Path) -> None:
    native = _native.native_module()
    known = [] if native is None else native.cpu_isa().split()
    flags = next((FLAGS[isa] for isa in reversed(FLAGS) if isa in known), [])
    done = build_and_run(SOURCE, tmp_path, ["-Werror", "-g0", "-ffp-contract=off", *flags], sanitizers)
    assert done.returncode == 0, done.stdout + done.stderr
