"""Gates on ahead-of-time compiled kernels. A gate is a function from a kernel to what is wrong with it."""

from specdec_kernels.kernels._aot import ARCHITECTURES, Compiled, compile_only

# The matrix instruction of an architecture, for a tile of 64 rows and more, and for a smaller one.
MATRIX = {
    "sm_80": ("mma", "mma"),
    "sm_90": ("wgmma", "mma"),
    "sm_100": ("tcgen05", "mma"),
    "gfx942": ("mfma", "mfma"),
    "gfx950": ("mfma", "mfma"),
}


def compiled(architecture: str, launch) -> dict[str, Compiled]:
    """Compile what ``launch()`` launches; return the kernels by name."""
    with compile_only(architecture) as found:
        launch()
    for kernel in found:
        print(
            f"{architecture} {kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} B stack, "
            f"{kernel.shared_bytes} B shared, {kernel.programs_per_multiprocessor} programs on a multiprocessor, "
            f"{kernel.matrix_instructions()}, {kernel.wide_loads()} loads of 16 B"
        )
    return {kernel.name: kernel for kernel in found}


def matrix_faults(kernel: Compiled, block_m: int) -> list[str]:
    """Require the matrix unit that a tile of this height should reach."""
    wanted = MATRIX[kernel.architecture][block_m < 64]
    return [] if wanted in kernel.matrix_instructions() else [f"no {wanted}: {kernel.matrix_instructions()}"]


def load_faults(kernel: Compiled, paged: bool = False, byte_cache: bool = False) -> list[str]:
    """Require that K/V tiles arrive in loads of 16 bytes a lane, on NVIDIA asynchronously and nothing narrower.

    Page ids are the exception, 4 bytes each, and the V tile of an 8-bit cache in front of the `mma` instruction: Triton
    lays it out in shared memory by 8 elements, which are 8 bytes.
    """
    if ARCHITECTURES[kernel.architecture].target.backend == "hip":
        return [] if kernel.wide_loads() else ["no 16-byte loads"]
    allowed = {"LDGSTS.E"} if paged else set()
    allowed |= {"LDGSTS.E.64"} if byte_cache and "mma" in kernel.matrix_instructions() else set()
    narrow = {text for text in kernel.instructions if text.startswith("LDGSTS") and ".128" not in text} - allowed
    found = [f"narrow asynchronous loads: {sorted(narrow)}"] if narrow else []
    return found + ([] if kernel.count(r"LDGSTS\..*128.*") else ["no asynchronous 16-byte loads"])
