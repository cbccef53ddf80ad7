"""Native extensions; everything else about the package is in pyproject.toml.

``SPECDEC_BUILD`` chooses what is built:

- ``auto`` (default): the CPU kernels when a C++ compiler is found, the CUDA kernels when nvcc is found
  (a GPU is not needed to build them). What is skipped prints one line saying why.
- ``cpu``: the CPU kernels, or fail.   ``cuda``: CPU and CUDA kernels, or fail.
- ``none``: a pure Python package that runs on the references.

``TORCH_CUDA_ARCH_LIST`` (for example ``8.0;9.0+PTX``) and ``MAX_JOBS`` are respected. The sources use the
LibTorch stable ABI only, so nvcc can compile them against a CPU-only torch wheel.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
CPU_NAME = "specdec_kernels._C"
CUDA_NAME = "specdec_kernels._C_cuda"
# 2.10: the oldest stable ABI that has what we use; see torch/csrc/stable/version.h.
TORCH_TARGET_VERSION = "0x020a000000000000"
DEFAULT_CUDA_ARCHS = "8.0;9.0;10.0+PTX"
# csrc/cpu/<folder>: sources compiled for more than the compiler's default instruction set; kernels choose at run time.
# GCC's AVX512 headers warn about their own undefined vectors.
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
AVX512_FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
ISA_FLAGS = {
    "avx2": AVX2_FLAGS,
    "avx512": AVX512_FLAGS,
    "avx512_bf16": [*AVX512_FLAGS, "-mavx512bf16"],
}


def say(text: str) -> None:
    print(f"specdec-kernels: {text}", file=sys.stderr, flush=True)


def find_cxx() -> list[str] | None:
    """Return the compiler as words: what CXX says and nothing else, or one of the usual names."""
    for command in [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]:
        words = shlex.split(command)
        if shutil.which(words[0]):
            return words
    return None


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (shutil.which("nvcc", path=f"{home}/bin") if home else None) or shutil.which("nvcc")


def missing_for_build(cuda: bool) -> str | None:
    """Say what keeps a kind of kernels from being built, or None."""
    if sys.platform == "win32":
        return "the native build is not supported on Windows"
    if cuda and find_nvcc() is None:
        return "nvcc was not found (set CUDA_HOME)"
    if find_cxx() is None:
        return "no C++ compiler was found (set CXX)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h was not found (install the development files of this Python)"
    for module in ("torch", "ninja", "pybind11"):
        try:
            __import__(module)
        except ImportError:
            return f"{module} cannot be imported at build time (install it first, then use --no-build-isolation)"
    return None


def choose_extensions() -> list[Extension]:
    mode = os.environ.get("SPECDEC_BUILD", "auto")
    if mode not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"SPECDEC_BUILD must be auto, cpu, cuda or none, got {mode!r}")
    wanted = {"none": [], "cpu": [CPU_NAME], "cuda": [CPU_NAME, CUDA_NAME], "auto": [CPU_NAME, CUDA_NAME]}[mode]
    chosen = []
    for name in wanted:
        reason = missing_for_build(cuda=name == CUDA_NAME)
        if reason and mode != "auto":
            raise SystemExit(f"SPECDEC_BUILD={mode}: cannot build {name}: {reason}")
        if reason:
            say(f"skipping {name}: {reason}")
        else:
            isa_folders = [f"cpu/{f}" for f in ISA_FLAGS] if platform.machine() in ("x86_64", "AMD64") else []
            folders = ["cuda"] if name == CUDA_NAME else ["cpu", *isa_folders, "."]
            sources = [
                p for f in folders for p in sorted((ROOT / "csrc" / f).glob("*.c*")) if p.suffix in (".cpp", ".cu")
            ]
            chosen.append(Extension(name, [str(p.relative_to(ROOT)) for p in sources], optional=mode == "auto"))
    if mode == "none":
        say("native kernels skipped: SPECDEC_BUILD=none")
    return chosen


def cuda_arch_flags() -> list[str]:
    flags = []
    for arch in os.environ.get("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHS).replace(" ", ";").split(";"):
        if arch:
            number = arch.removesuffix("+PTX").replace(".", "")
            flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
            if arch.endswith("+PTX"):
                flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def ninja_path(path: object) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def shell_words(words: Iterable[object]) -> str:
    return " ".join(shlex.quote(str(word)) for word in words).replace("$", "$$")


def ninja_rules() -> str:
    """Write the commands: ``cxx`` and ``nvcc`` compile, ``link_cxx`` and ``link_nvcc`` link."""
    import pybind11
    from torch.utils.cpp_extension import include_paths, library_paths

    folders = [*include_paths(), sysconfig.get_path("include"), pybind11.get_include()]
    includes = [f"-I{ROOT / 'csrc'}", *(word for folder in folders for word in ("-isystem", folder))]
    common = ["-std=c++20", "-O3", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    user_flags = shlex.split(os.environ.get("CXXFLAGS", ""))
    told = '"' + shlex.join([*common[:2], *user_flags]).replace('"', '\\"') + '"'
    cxx_flags = [*common, *user_flags, "-fPIC", "-fvisibility=hidden", f"-ffile-prefix-map={ROOT}/="]
    # No contraction: whether a * b + c is fused must not depend on where the compiler inlines it.
    cxx_flags += ["-Wall", "-Wextra", "-Wno-unused-parameter", "-ffp-contract=off", f"-DSPECDEC_CXX_FLAGS={told}"]
    nvcc_flags = [*common, "--threads", "0", "-Xcompiler", f"-fPIC,-ffile-prefix-map={ROOT}/=", "-DUSE_CUDA"]
    nvcc_flags += ["-Xptxas", "-v", *cuda_arch_flags()]
    shared = ["-shared", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    libraries = [*(f"-L{p}" for p in library_paths()), "-ltorch", "-ltorch_cpu", "-lc10"]
    cxx, nvcc = shell_words(find_cxx() or ["c++"]), shell_words([find_nvcc() or "nvcc"])
    return f"""\
rule cxx
  command = {cxx} -MMD -MF $out.d {shell_words([*cxx_flags, *includes])} $isa_flags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule nvcc
  command = {nvcc} -MD -MF $out.d {shell_words([*nvcc_flags, *includes])} -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link_cxx
  command = {cxx} {shell_words([*shared, *user_flags])} $in {shell_words(libraries)} -o $out
rule link_nvcc
  command = {nvcc} -shared -Xcompiler -fPIC $in {shell_words(libraries)} -o $out
"""


def ninja_text(sources: list[str], target: Path, work: Path) -> str:
    """Write the build as ninja rules: one object a source, one shared library."""
    lines = [ninja_rules()]
    objects = []
    for source in sources:
        objects.append(ninja_path(work / f"{source.replace('/', '_')}.o"))
        lines.append(f"build {objects[-1]}: {'nvcc' if source.endswith('.cu') else 'cxx'} {ninja_path(ROOT / source)}")
        lines.append(f"  isa_flags = {shell_words(ISA_FLAGS.get(Path(source).parent.name, []))}")
    link = "link_nvcc" if any(s.endswith(".cu") for s in sources) else "link_cxx"
    lines.append(f"build {ninja_path(target)}: {link} {' '.join(objects)}")
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext):
    """Build each extension with ninja; dependency files make rebuilds incremental."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        work = Path(self.build_temp).absolute() / ext.name
        work.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        (work / "build.ninja").write_text(ninja_text(ext.sources, target, work))
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        try:
            subprocess.run([sys.executable, "-m", "ninja", "-C", str(work), *jobs], check=True)
        except subprocess.CalledProcessError as error:
            if ext.optional:
                say(
                    f"skipping {ext.name}: the compiler failed, see above (SPECDEC_BUILD=cpu or cuda makes it an error)"
                )
            raise CompileError(f"building {ext.name} failed") from error


setup(ext_modules=choose_extensions(), cmdclass={"build_ext": NinjaBuild})
