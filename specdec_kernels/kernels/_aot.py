"""Compile a launch for a GPU that is not here, and read from the machine code what it will need.

A launcher is called as in production, with CPU tensors; inside `compile_only` its kernels are compiled with the very
signature, constants and alignments that Triton would use, and are not launched. ``cuobjdump``, which comes in the
triton wheel, gives registers and instructions; AMD's assembly carries its own.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget

from . import _common

# The matrix instruction of an architecture, for a tile of 64 rows and more, and for a smaller one.
MATRIX = {
    "sm_80": ("mma", "mma"),
    "sm_90": ("wgmma", "mma"),
    "sm_100": ("tcgen05", "mma"),
    "gfx942": ("mfma", "mfma"),
    "gfx950": ("mfma", "mfma"),
}
_CUDA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Architecture:
    """The limits of one multiprocessor (compute unit) that bound how many programs run on it at once."""

    target: GPUTarget
    device: _common.Device
    shared_bytes: int  # that one program may take
    shared_bytes_total: int
    registers: int  # 32-bit ones of all lanes
    max_warps: int
    max_programs: int
    register_unit: int  # registers per warp are handed out in multiples of this


def _nvidia(capability: int, multiprocessors: int, shared_kb: int) -> Architecture:
    device = _common.nvidia_device(capability, multiprocessors)
    shared = shared_kb * 1024
    return Architecture(GPUTarget("cuda", capability, 32), device, shared, shared + 1024, 65536, 64, 32, 256)


def _amd(name: str, multiprocessors: int, shared_kb: int) -> Architecture:
    device = _common.Device((name, "hip", "default"), multiprocessors, name == "gfx950", name == "gfx942")
    shared = shared_kb * 1024
    return Architecture(GPUTarget("hip", name, 64), device, shared, shared, 131072, 32, 32, 512)


ARCHITECTURES = {
    "sm_80": _nvidia(80, 108, 163),
    "sm_90": _nvidia(90, 132, 227),
    "sm_100": _nvidia(100, 148, 227),
    "gfx942": _amd("gfx942", 304, 64),
    "gfx950": _amd("gfx950", 256, 160),
}


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: what it needs of a multiprocessor, and its instructions."""

    name: str
    architecture: str
    num_warps: int
    registers: int  # of one lane
    spill_bytes: int  # stack (scratch) of one lane; spills live there
    shared_bytes: int
    instructions: Counter[str] = field(repr=False)

    @property
    def programs_per_multiprocessor(self) -> int:
        """Return how many programs one multiprocessor holds at once."""
        limits = ARCHITECTURES[self.architecture]
        lanes = limits.target.warp_size
        unit = limits.register_unit
        per_warp = -(-self.registers * lanes // unit) * unit
        by_registers = limits.registers // per_warp // self.num_warps
        reserved = 1024 if limits.target.backend == "cuda" else 0
        by_shared = limits.shared_bytes_total // max(self.shared_bytes + reserved, 1)
        return min(by_registers, by_shared, limits.max_warps // self.num_warps, limits.max_programs)

    def count(self, pattern: str) -> int:
        """Count the instructions whose whole text (name and modifiers) matches a regular expression."""
        return sum(n for text, n in self.instructions.items() if re.fullmatch(pattern, text))

    def matrix_instructions(self) -> dict[str, int]:
        """Return how many instructions of each kind of matrix unit there are."""
        kinds = {"mma": r"[HIQD]MMA\..*", "wgmma": r"[HIQ]GMMA\..*", "tcgen05": r"UTC[HIQO]MMA.*", "mfma": "v_mfma.*"}
        return {name: n for name, pattern in kinds.items() if (n := self.count(pattern))}

    def wide_loads(self) -> int:
        """Count loads of 16 bytes a lane from global memory, asynchronous ones (to shared memory) included."""
        return self.count(r"(LDGSTS|LDG)\..*128.*|(global|buffer|flat)_load_(dwordx4|b128).*")

    def faults(self) -> list[str]:
        """Name what no shipped kernel may have: spills, or more registers or shared memory than there are."""
        limit = ARCHITECTURES[self.architecture].shared_bytes
        found = [f"{self.spill_bytes} bytes of stack"] if self.spill_bytes else []
        found += [f"{self.shared_bytes} bytes of shared memory, limit {limit}"] if self.shared_bytes > limit else []
        found += ["not one program fits on a multiprocessor"] * (self.programs_per_multiprocessor < 1)
        return found

    def matrix_faults(self, block_m: int) -> list[str]:
        """Require the matrix unit that a tile of this height should reach."""
        wanted = MATRIX[self.architecture][block_m < 64]
        return [] if wanted in self.matrix_instructions() else [f"no {wanted}: {self.matrix_instructions()}"]

    def load_faults(self, paged: bool = False, byte_cache: bool = False, has_sinks: bool = True) -> list[str]:
        """Require that tiles arrive in loads of 16 bytes a lane, on NVIDIA asynchronously and nothing narrower.

        Page ids are the exception, 4 bytes each, and the V tile of an 8-bit cache in front of the `mma` instruction:
        Triton lays it out in shared memory by 8 elements, which are 8 bytes. Other loads, of the last tiles and of what
        is not a tile, take 4 bytes and more; only sinks take 2.
        """
        single = r"LDG\..*[US](8|16)|(global|buffer|flat)_load_(ubyte|sbyte|ushort|sshort|short|[ui](8|16)).*"
        found = [] if has_sinks or not self.count(single) else [f"{self.count(single)} loads of single values"]
        if ARCHITECTURES[self.architecture].target.backend == "hip":
            return found + ([] if self.wide_loads() else ["no 16-byte loads"])
        allowed = {"LDGSTS.E"} if paged else set()
        allowed |= {"LDGSTS.E.64"} if byte_cache and "mma" in self.matrix_instructions() else set()
        narrow = {text for text in self.instructions if text.startswith("LDGSTS") and ".128" not in text} - allowed
        found += [f"narrow asynchronous loads: {sorted(narrow)}"] if narrow else []
        return found + ([] if self.count(r"LDGSTS\..*128.*") else ["no asynchronous 16-byte loads"])


class _NoDevice:
    """What Triton asks of a driver. The name keeps the caches of different uses apart; ``start`` gets the launches."""

    def __init__(self, target: GPUTarget, name: str, start: Callable | None = None):
        self._target, self._name, self._start = target, name, start
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 1 << 20},
            load_binary=lambda name, binary, shared, device: (1, hash(binary), 0, 0, 1024),
        )

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return self._name

    def get_current_stream(self, _device=None) -> int:
        return 0

    def launcher_cls(self, _source, _metadata) -> Callable | None:
        return self._start


@contextmanager
def stub_driver(architecture: str, name: str, start: Callable | None) -> Iterator[None]:
    """Let launches go their usual way as far as the driver; call ``start`` with its arguments there.

    They are: the grid, the stream, a number that is the same for the same binary, five of Triton's, the kernel's.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("the kernels are interpreted, not compiled: unset TRITON_INTERPRET")
    limits, driver = ARCHITECTURES[architecture], triton.runtime.driver
    before = driver._active
    driver.set_active(_NoDevice(limits.target, f"{name} {architecture}", start))
    try:
        with _common.pretend_device(limits.device):
            yield
    finally:
        driver._active = before


@contextmanager
def _never_launch(architecture: str, name: str, compiled: Callable[[str, object], None]) -> Iterator[None]:
    """Give ``compiled`` the name and the binary of each kernel launched inside, instead of launching it."""
    run = triton.JITFunction.run

    def compile_instead(kernel, *args, grid, warmup, **options):
        compiled(kernel.fn.__name__, run(kernel, *args, grid=grid, warmup=True, **options))

    with stub_driver(architecture, name, None):
        triton.JITFunction.run = compile_instead
        try:
            yield
        finally:
            triton.JITFunction.run = run


@contextmanager
def compile_only(architecture: str) -> Iterator[list[Compiled]]:
    """Compile every kernel launched inside for the architecture instead of launching it; yield the list of them."""
    found: dict[int, Compiled] = {}
    kernels: list[Compiled] = []

    def add(name: str, binary) -> None:
        if id(binary) not in found:
            found[id(binary)] = _inspect(name, architecture, binary)
            kernels.append(found[id(binary)])

    with _never_launch(architecture, "compile", add):
        yield kernels


@contextmanager
def count_variants(architecture: str) -> Iterator[set[tuple[str, str]]]:
    """Compile nothing; yield the set of (kernel, key) that Triton would compile for the launches inside."""
    variants: set[tuple[str, str]] = set()

    def note(*, key, fn, **_) -> bool:
        variants.add((fn.jit_function.fn.__name__, str(key)))
        return True  # do not compile

    before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, note
    try:
        with _never_launch(architecture, "count", lambda name, binary: None):
            yield variants
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def _inspect(name: str, architecture: str, binary) -> Compiled:
    if ARCHITECTURES[architecture].target.backend == "hip":
        registers, spill_bytes, instructions = _inspect_amd(binary.asm["amdgcn"])
    else:
        registers, spill_bytes, instructions = _inspect_nvidia(binary.asm["cubin"])
    return Compiled(
        name, architecture, binary.metadata.num_warps, registers, spill_bytes, binary.metadata.shared, instructions
    )


@cache
def _inspect_nvidia(cubin: bytes) -> tuple[int, int, Counter[str]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUDA_TOOLS / "cuobjdump"), "--dump-resource-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK):(\d+)", text)}
    return (
        used["REG"],
        used["STACK"],
        Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([\w.]+)", text, re.MULTILINE)),
    )


@cache
def _inspect_amd(text: str) -> tuple[int, int, Counter[str]]:
    facts = {
        key: int(n)
        for key, n in re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", text)
    }
    spills = facts["private_segment_fixed_size"] + 4 * facts["vgpr_spill_count"]
    return facts["vgpr_count"], spills, Counter(re.findall(r"^\s+([a-z]\w+)", text, re.MULTILINE))
