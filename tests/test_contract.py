"""The native kernels fit the schemas, and a native extension that does not load is survived and explained."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import specdec_kernels
from specdec_kernels import _native
from specdec_kernels._ops import add_op_namespace_prefix
from specdec_kernels._registry import OPS

from .marks import needs_native

PACKAGE = Path(specdec_kernels.__file__).parent
CSRC = PACKAGE.parent / "csrc"


def schema_types(schema: str) -> str:
    """Return the argument types of a schema as torch prints them: ``List[Tensor], Tensor, Optional[float]``."""
    return ", ".join(str(argument.type) for argument in torch._C.parse_schema(schema).arguments)


def native_types() -> dict[str, str]:
    native = _native.native_module()
    return native.schemas() if native else {}


@pytest.mark.parametrize("name", sorted(native_types()) or [pytest.param("", marks=needs_native)])
def test_native_types_fit_the_schema(name: str) -> None:
    """A kernel whose C++ types differ from the schema would crash the process at its first call."""
    assert native_types()[name] == schema_types(OPS[name].schema)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix(name), "CPU")


def test_type_comparison_sees_a_difference() -> None:
    assert schema_types("f(Tensor(a!)[] x, float? y, int k) -> ()") == "List[Tensor], Optional[float], int"
    assert schema_types("f(Tensor x, float y, int k) -> ()") != schema_types("f(Tensor x, float y, float k) -> ()")


@needs_native
def test_every_native_source_is_in_this_build() -> None:
    """``csrc/cpu/<stem>.cpp`` serves the ops of ``reference/<stem>.py``; a stale extension would lack them."""
    stems = {path.stem for path in (CSRC / "cpu").glob("*.cpp")}
    if not stems:
        pytest.skip("no sources beside the package (installed from a wheel)")
    served = {OPS[name].reference.__module__.rpartition(".")[2] for name in native_types()}
    assert served == stems, "the extension is older than the sources: pip install --no-build-isolation -e ."


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op_has_its_six_places(name: str) -> None:
    record = OPS[name]
    stem = record.reference.__module__.rpartition(".")[2]
    assert record.schema.startswith(f"{name}(")
    assert record.reference.__module__ == f"specdec_kernels.reference.{stem}"
    assert record.reference.__name__ == f"{name.removesuffix('_')}_ref"
    assert (PACKAGE / "ops" / f"{stem}.py").exists()
    assert list((PACKAGE.parent / "tests" / "ops").glob(f"test_{stem}*.py"))
    assert getattr(specdec_kernels, name).__doc__
    assert name in specdec_kernels.__all__


@needs_native
@pytest.mark.parametrize("name", sorted(OPS))
def test_native_kernels_are_declared(name: str) -> None:
    """What `doctor` believes to exist, though it may not be built here, is what there is."""
    record = OPS[name]
    source = CSRC / "cuda" / f"{record.reference.__module__.rpartition('.')[2]}.cu"
    assert ("cpu" in record.native) == (name in native_types()), "say in define_op(native=...) what the build has"
    assert ("cuda" in record.native) == source.exists() or not CSRC.exists()


@pytest.mark.parametrize("name", sorted(OPS))
def test_mutation_is_declared(name: str) -> None:
    """A trailing underscore, and only that, says that an op writes to its arguments; such an op returns nothing."""
    schema = torch._C.parse_schema(OPS[name].schema)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    assert writes == name.endswith("_")
    assert not (writes and schema.returns)


REPORT = """
import json, torch, specdec_kernels
from specdec_kernels import _native
cache = torch.arange(8.0).view(1, 8, 1)
one = lambda *values: torch.tensor(values, dtype=torch.int32)
specdec_kernels.kv_compact_([cache], one(2, 5)[None], one(2), one(1))
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("specdec_kernels::kv_compact_", "CPU")
print(json.dumps([_native.load_errors, has_kernel, cache.flatten().tolist()]))
"""


def import_elsewhere(folder: Path, **environment: str) -> tuple[dict[str, str | None], bool, list[float]]:
    """Import the package found in ``folder`` in a fresh process; return load errors, kernel present, a result."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "SPECDEC_NATIVE": "1", **environment, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", REPORT], env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    """Copy the package without its native extensions."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def place_extension(folder: Path) -> Path:
    return folder / PACKAGE.name / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def check_survived(report, reason: str) -> None:
    errors, has_kernel, cache = report
    assert reason in errors["_C"]
    assert "\n" not in errors["_C"]
    assert not has_kernel
    assert cache == [0, 1, 3, 6, 4, 5, 6, 7]


def test_survives_a_missing_extension(copied_package: Path) -> None:
    check_survived(import_elsewhere(copied_package), "not built")


def test_survives_a_corrupt_extension(copied_package: Path) -> None:
    place_extension(copied_package).write_bytes(b"not a library" * 100)
    check_survived(import_elsewhere(copied_package), place_extension(copied_package).name)


def test_survives_an_extension_of_another_torch(copied_package: Path) -> None:
    """It wants a symbol this torch does not have."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler (set CC)")
    source = copied_package / "other.c"
    source.write_text(
        "void symbol_of_another_torch(void); void* PyInit__C(void) { symbol_of_another_torch(); return 0; }"
    )
    command = [compiler, "-shared", "-fPIC", str(source), "-o", str(place_extension(copied_package))]
    subprocess.run(command, check=True)
    check_survived(import_elsewhere(copied_package), "symbol_of_another_torch")


def test_can_be_turned_off() -> None:
    check_survived(import_elsewhere(PACKAGE.parent, SPECDEC_NATIVE="0"), "SPECDEC_NATIVE=0")


@needs_native
def test_loads_when_turned_on() -> None:
    errors, has_kernel, cache = import_elsewhere(PACKAGE.parent)
    assert errors["_C"] is None
    assert has_kernel
    assert cache == [0, 1, 3, 6, 4, 5, 6, 7]


@needs_native
def test_build_info() -> None:
    native = _native.native_module()
    info = native.build_info()
    assert set(info) == {"compiler", "flags", "isa", "torch"}
    assert info["torch"].split(".")[0] == torch.__version__.split(".")[0]
    assert native.cpu_isa().split()
