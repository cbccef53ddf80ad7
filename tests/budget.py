"""The size budget: files, functions and arguments, with the worst three of each. ``python -m tests.budget``."""

import ast
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "specdec_kernels"
FILE_LINES, FILE_LINES_HARD = 300, 400
FUNCTION_LINES, KERNEL_LINES = 50, 100
MEDIAN_FUNCTION_LINES = 15
ARGUMENTS = 8
Measure = tuple[int, str]


def source_files() -> list[Path]:
    folders = (PACKAGE, ROOT / "csrc", ROOT / "tests", ROOT / "benchmarks")
    kinds = {".py", ".cpp", ".h", ".cu", ".cuh"}
    return [p for folder in folders for p in sorted(folder.rglob("*")) if p.suffix in kinds]


def is_kernel(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def body_lines(node: ast.FunctionDef) -> int:
    """Count the lines of a function's body; the signature and the docstring are its contract and may be long."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def positional_arguments(node: ast.FunctionDef) -> int:
    """Count what a caller may pass by position; keyword-only options name themselves."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    return len([n for n in names if n not in ("self", "cls")])


def measure() -> dict[str, list[Measure]]:
    """Return, for each kind, all (size, place) pairs, largest first."""
    found: dict[str, list[Measure]] = {"file": [], "function": [], "kernel": [], "arguments": []}
    for path in source_files():
        text = path.read_text()
        place = str(path.relative_to(ROOT))
        found["file"].append((text.count("\n"), place))
        if path.suffix != ".py" or PACKAGE not in path.parents:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                where = f"{place}:{node.lineno} {node.name}"
                found["kernel" if is_kernel(node) else "function"].append((body_lines(node), where))
                if not node.name.startswith("_") and not is_kernel(node):
                    found["arguments"].append((positional_arguments(node), where))
    return {kind: sorted(rows, reverse=True) for kind, rows in found.items()}


def violations(found: dict[str, list[Measure]]) -> list[str]:
    """Return what breaks the budget; a file between the soft and the hard limit is only shown."""
    limits = {"file": FILE_LINES_HARD, "function": FUNCTION_LINES, "kernel": KERNEL_LINES, "arguments": ARGUMENTS}
    broken = [
        f"{kind} of {size} (limit {limits[kind]}): {place}"
        for kind, rows in found.items()
        for size, place in rows
        if size > limits[kind]
    ]
    median = statistics.median([size for size, _ in found["function"]] or [0])
    if median > MEDIAN_FUNCTION_LINES:
        broken.append(f"median function of {median} lines (limit {MEDIAN_FUNCTION_LINES})")
    return broken


def main() -> int:
    found = measure()
    for kind, rows in found.items():
        print(f"largest {kind}: " + "; ".join(f"{size} {place}" for size, place in rows[:3]))
    over = sum(size > FILE_LINES for size, _ in found["file"])
    print(
        f"median function: {statistics.median(s for s, _ in found['function'])} lines; {over} files over {FILE_LINES}"
    )
    broken = violations(found)
    for line in broken:
        print("over budget:", line)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
