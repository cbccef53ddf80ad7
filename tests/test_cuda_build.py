"""`csrc/cuda` compiles for each architecture we promise, without spills, with 16-byte accesses: no GPU needed."""

import importlib.util
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

CSRC = Path(__file__).parents[1] / "csrc"
SOURCES = sorted((CSRC / "cuda").glob("*.cu"))
ARCHS = ["sm_80", "sm_90", "sm_100"]
# With 128 registers two blocks of 256 threads still fit on a multiprocessor, one waiting for memory while one issues.
MAX_REGISTERS = 128


def find_tool(name: str) -> str:
    """Find a CUDA tool in CUDA_HOME, on PATH, or in the triton wheel; skip when there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [f"{home}/bin"] if home else []
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    tool = shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))
    if tool is None:
        pytest.skip(f"{name} was not found (set CUDA_HOME)")
    return tool


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory):
    """Return ``compile(source, arch, *flags) -> (cubin, ptxas log)``; each combination is compiled once."""
    folder = tmp_path_factory.mktemp("cubin")

    @cache
    def compile_once(source: Path, arch: str, *flags: str) -> tuple[Path, str]:
        cubin = folder / f"{source.stem}-{arch}-{len(list(folder.iterdir()))}.cubin"
        includes = [f"-I{CSRC}", *(word for path in include_paths() for word in ("-isystem", path))]
        command = [find_tool("nvcc"), "-std=c++20", "-O3", "-cubin", f"-arch={arch}", "-Xptxas", "-v", "-DUSE_CUDA"]
        command += ["-DTORCH_TARGET_VERSION=0x020a000000000000", *includes, *flags, str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return cubin, done.stderr

    return compile_once


def resources(log: str) -> dict[str, dict[str, int]]:
    """Read registers, stack and spills of each kernel from the log of ``ptxas -v``."""
    found = {}
    pattern = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers"
    )
    for name, stack, stores, loads, registers in re.findall(pattern, log, re.DOTALL):
        found[name] = {"registers": int(registers), "stack": int(stack), "spills": int(stores) + int(loads)}
    return found


def faults(kernels: dict[str, dict[str, int]]) -> list[str]:
    """Name what a kernel must not have."""
    return [
        f"{name}: {use}"
        for name, use in kernels.items()
        if use["stack"] or use["spills"] or use["registers"] > MAX_REGISTERS
    ]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_spills(source: Path, arch: str, compiled) -> None:
    kernels = resources(compiled(source, arch)[1])
    for name, use in kernels.items():
        print(f"{arch} {name}: {use['registers']} registers, {use['stack']} B stack, {use['spills']} B spills")
    assert len(kernels) >= 1
    assert not faults(kernels)


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_move_in_16_byte_lanes(arch: str, compiled) -> None:
    """Both kernels, dense and paged, load and store 16 bytes an instruction, four loads before the first store."""
    cubin, _ = compiled(CSRC / "cuda" / "kv_compact.cu", arch)
    sass = subprocess.run([find_tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    functions = re.split(r"^\.text\.", sass, flags=re.MULTILINE)[1:]
    assert len(functions) == 2
    for function in functions:
        wide = re.findall(r"\b(LDG|STG|LD|ST)\.E\.(?:\w+\.)*128", function)
        print(f"{arch} {function.partition(':')[0]}: {wide}")
        assert [access[:2] for access in wide] == ["LD"] * 4 + ["ST"] * 4


BAD_KERNEL = """
__global__ void indexes_its_registers(int* data, const int* order) {
  int held[64];
  for (int i = 0; i < 64; ++i) held[i] = data[i];
  for (int i = 0; i < 64; ++i) data[i] = held[order[i]];
}
"""


def test_gate_sees_a_stack(compiled, tmp_path: Path) -> None:
    """The gate itself: an array that cannot live in registers must show."""
    source = tmp_path / "bad.cu"
    source.write_text(BAD_KERNEL)
    kernels = resources(compiled(source, "sm_90")[1])
    assert len(faults(kernels)) == 1
