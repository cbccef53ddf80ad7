"""Ahead-of-time compiled kernels for the tests of their gates."""

from specdec_kernels.kernels._aot import Compiled, compile_only


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
