"""``specdec-kernels doctor``: which kernel serves each op, and the true reason for a slow one."""

import subprocess
import sys

import pytest

from specdec_kernels import _native
from specdec_kernels._registry import OPS
from specdec_kernels.cli.__main__ import main


def op_lines(text: str) -> dict[str, tuple[str, str, str]]:
    """Return op -> (kernel on the CPU, kernel on the GPU, reasons)."""
    words = (line.split(maxsplit=3) for line in text.splitlines())
    return {w[0]: (w[1], w[2], w[3] if len(w) > 3 else "") for w in words if w and w[0] in OPS}


def test_every_op_has_a_kernel_or_a_reason(capsys) -> None:
    assert main(["doctor"]) == 0
    lines = op_lines(capsys.readouterr().out)
    assert set(lines) == set(OPS)
    for cpu, cuda, reasons in lines.values():
        assert (cpu == "reference") == ("cpu:" in reasons)
        assert (cuda == "reference") == ("cuda:" in reasons)


@pytest.mark.parametrize("extension", ["_C", "_C_cuda"])
def test_repeats_the_load_error_of_what_exists(extension, monkeypatch, capsys) -> None:
    """Only ops that have a kernel in the extension blame it."""
    device = {"_C": "cpu", "_C_cuda": "cuda"}[extension]
    monkeypatch.setitem(_native.load_errors, extension, "undefined symbol: gone")
    monkeypatch.setattr("torch._C._dispatch_has_kernel_for_dispatch_key", lambda name, key: False)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"{extension}: not loaded: undefined symbol: gone" in text
    for name, (_, _, reasons) in op_lines(text).items():
        blames = device in OPS[name].native and not (device == "cuda" and OPS[name].triton)
        assert (f"{device}: undefined symbol: gone" in reasons) == blames, name
    assert any(device in record.native for record in OPS.values())


def test_without_triton_the_reference_serves_the_gpu() -> None:
    code = (
        "import sys; sys.modules['triton'] = None;"
        "from specdec_kernels.cli.__main__ import main; raise SystemExit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = op_lines(done.stdout)
    for name, record in OPS.items():
        if record.triton:
            assert lines[name][1] == "reference"
            assert "cuda: triton is not installed" in lines[name][2]
    assert any(record.triton for record in OPS.values())
