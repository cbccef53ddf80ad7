"""Run the interpreter's tests in a process of their own: Triton decides at its import whether to interpret."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpret"


OPS = FOLDER.parents[1] / "ops"
# Tests of the ops themselves that need few programs, on the Triton launchers.
FEW_PROGRAMS = [
    *(str(OPS / f"test_{name}.py") for name in ("verify_cases", "verify_robust", "verify_philox", "linear", "decoder")),
    *("-m", "not gpu", "-k"),
    "(cases and not (filtered_tokens or one_uniform)) or parents_out_of_order or need_no_uniforms or unreadable_row_of "
    "or unreadable_draft_row or behind_a_rejection or empty_batch or ids_stay or ties or typical_takes "
    "or (philox and not independent) or ((test_linear or test_decoder) and interpret and (exact or bits or extremes))",
]


@pytest.mark.parametrize("arguments", [[str(FOLDER)], FEW_PROGRAMS], ids=["kernels", "ops"])
def test_interpreted_kernels(arguments: list[str]) -> None:
    """Every test passes, none is skipped. Alone, of the kernels: ``TRITON_INTERPRET=1 pytest`` in ``interpret/``."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed(, \d+ \w+)* in", done.stdout, re.MULTILINE), done.stdout[-500:]
    assert "skipped" not in done.stdout.splitlines()[-1]
