"""``specdec-kernels inspect``: compile the Triton kernels for GPUs that need not be here, and show what they take."""

import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from ._kernel_cases import Case, KernelCase, PhiloxCase, medusa_project_cases, tree_attention_cases, verify_cases
from ._layer_cases import decoder_cases, linear_cases

CASES: dict[str, Callable[[bool], Iterator]] = {
    "tree_attention": tree_attention_cases,
    "decoder": decoder_cases,
    "linear": linear_cases,
    "medusa_project": medusa_project_cases,
    "verify": verify_cases,
    "philox_uniforms": lambda everything: iter([PhiloxCase()]),
}


def add_arguments(parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--op", choices=sorted(CASES), action="append", help="only this op (may be repeated)")
    parser.add_argument("--arch", action="append", help="sm_80, sm_90, sm_100, gfx942, gfx950 (may be repeated)")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--all", action="store_true", help="every kernel that differs, not two for each configuration")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compile in N processes (default 1)")


def run(args) -> int:
    """Print the table; return 1 when a kernel spills, does not fit, or lacks the instructions it should have."""
    from ..kernels import _aot

    architectures = args.arch or list(_aot.ARCHITECTURES)
    for name in architectures:
        if name not in _aot.ARCHITECTURES:
            raise SystemExit(f"inspect: --arch must be one of {', '.join(_aot.ARCHITECTURES)}, got {name}")
    if args.jobs < 1:
        raise SystemExit(f"inspect: --jobs must be >= 1, got {args.jobs}")
    cases = [case for op in args.op or CASES for case in CASES[op](args.all) if args.match in str(case)]
    print(_ROW.format(*_HEADER), flush=True)
    num_bad, shown = 0, set()
    for architecture, case, kernels in compile_cases(itertools.product(architectures, cases), args.jobs):
        for kernel in kernels:
            faults = case.faults(architecture, kernel) if isinstance(case, Case) else kernel.faults()
            num_bad += bool(faults)
            # A kernel that assists is the same for many cases.
            if kernel is kernels[0] or faults or repr(kernel) not in shown:
                print(_row(architecture, case, kernel, faults), flush=True)
            shown.add(repr(kernel))
    return 1 if num_bad else 0


def compile_cases(jobs: Iterable[tuple[str, KernelCase]], num_processes: int) -> Iterator[tuple[str, KernelCase, list]]:
    """Yield (architecture, case, its kernels) for each (architecture, case), in order."""
    jobs = list(jobs)
    if num_processes == 1:
        yield from ((*job, compile_case(job)) for job in jobs)
        return
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from ((*job, kernels) for job, kernels in zip(jobs, pool.map(compile_case, jobs), strict=True))


def compile_case(job: tuple[str, KernelCase]) -> list:
    """Compile the kernels of one case for one architecture."""
    from ..kernels import _aot

    architecture, case = job
    with _aot.compile_only(architecture) as found:
        case.launch()
    return found


_HEADER = ("arch", "kernel", "case", "warps", "registers", "spills", "shared", "programs", "matrix", "16 B loads", "")
_ROW = "{:7} {:24} {:32} {:>5} {:>9} {:>6} {:>9} {:>8} {:>10} {:>10} {}"


def _row(architecture: str, case: object, kernel, faults: list[str]) -> str:
    matrix = ", ".join(f"{n} {name}" for name, n in kernel.matrix_instructions().items()) or "-"
    return _ROW.format(
        *(architecture, kernel.name.strip("_").removesuffix("_kernel"), str(case), kernel.num_warps),
        *(kernel.registers, kernel.spill_bytes, f"{kernel.shared_bytes / 1024:.1f} KB"),
        *(kernel.programs_per_multiprocessor, matrix, kernel.wide_loads(), "; ".join(faults)),
    )
