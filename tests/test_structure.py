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
# What is neither torch nor in the standard library, and the rooms that may import it.
THIRD_PARTY = {
    "accelerate": {"training"},
    "optuna": {"training"},
    "peft": {"training"},
    "safetensors": {"modules", "hf", "training", "cli"},
    "tqdm": {"training", "cli"},
    "transformers": {"hf", "training", "cli"},
    "triton": {"kernels", "cli"},
}


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


def home(name: str) -> str:
    """Return the room of an absolute name of the package; a public name belongs to the module that defines it."""
    top = name.split(".")[1] if "." in name else ""
    if top in specdec_kernels.__all__:
        return home(getattr(specdec_kernels, top).__module__)
    return top if top in LAYERS else ""


def fault(here: str, name: str) -> bool:
    """Say whether a module in room ``here`` must not import ``name``."""
    top = name.split(".")[0]
    if top == PACKAGE.name:
        there = home(name)
        return not (there in ("", here) or LAYERS[there] < LAYERS.get(here, 0) or (here, there) in SAME_LAYER)
    return top not in ("", "torch") and top not in sys.stdlib_module_names and here not in THIRD_PARTY.get(top, ())


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_go_down(path):
    assert [name for name in imported_modules(path) if fault(room(path), name)] == []


@pytest.mark.parametrize(
    ("here", "name"),
    [
        ("reference", "specdec_kernels.ops.verify"),
        ("reference", "specdec_kernels.tree_attention"),  # a public name of layer 2
        ("tree", "specdec_kernels.reference"),
        ("modules", "specdec_kernels.decoding.loop"),
        ("", "specdec_kernels.tree"),
        ("decoding", "transformers"),
        ("ops", "triton"),
        ("reference", "numpy"),
    ],
)
def test_an_import_upwards_is_a_fault(here, name):
    assert fault(here, name)
    assert not fault("cli", name) or name == "numpy"


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
