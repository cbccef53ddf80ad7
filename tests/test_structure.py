"""The shape of the house: imports only go down, importing is light, public names are pinned."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import specdec_kernels
from tests import budget

PACKAGE = Path(specdec_kernels.__file__).parent

# Folder or module -> layer. A module may import from lower layers, and from its own folder.
LAYERS = {
    "reference": 1,
    "tree": 1,
    "kernels": 1,
    "ops": 2,
    "modules": 3,
    "decoding": 4,
    "hf": 5,
    "training": 5,
    "cli": 6,
}
# The one sideways step the design allows.
SAME_LAYER = {("training", "hf")}
THIRD_PARTY = {"triton": {"kernels", "cli"}, "transformers": {"hf", "training", "cli"}}


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def imported_modules(path: Path):
    """Yield absolute dotted names of what a file imports, lazily imported modules included."""
    package = ["specdec_kernels", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            if name == "specdec_kernels" or not node.module:
                yield from (f"{name}.{alias.name}" for alias in node.names)


def sources():
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_go_down(path):
    here = room(path)
    for name in imported_modules(path):
        parts = name.split(".")
        if parts[0] == "specdec_kernels":
            there = parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""
            allowed = there in ("", here) or LAYERS[there] < LAYERS.get(here, 0) or (here, there) in SAME_LAYER
            assert allowed, f"{path.name} in layer {here!r} imports {name}"
        elif parts[0] in THIRD_PARTY:
            assert here in THIRD_PARTY[parts[0]], f"{path.name} in {here!r} imports {parts[0]}"


def test_import_is_light():
    code = (
        "import sys, specdec_kernels, torch;"
        "assert not {'triton', 'transformers'} & set(sys.modules), 'heavy import';"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_size_budget():
    assert budget.violations(budget.measure()) == []


def test_budget_can_fail():
    assert budget.violations({"file": [(401, "x.py")], "function": [(51, "f")], "kernel": [], "arguments": [(9, "g")]})


def test_public_names():
    assert sorted(specdec_kernels.__all__) == specdec_kernels.__all__
    for name in specdec_kernels.__all__:
        assert getattr(specdec_kernels, name) is not None
