"""What every test shares: a fixed seed, poisoned fresh memory, and the ``backend`` an op test runs on."""

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from specdec_kernels import _native
from specdec_kernels._ops import NAMESPACE, add_op_namespace_prefix
from specdec_kernels._registry import OPS, _lazy_launcher

PACKAGE = "specdec_kernels"
# Triton decides at its import whether it interprets kernels; such a process tests the Triton launchers only.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    importlib.import_module("tests.kernels.interpreter")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Make every test's random tensors the same in every run and every order."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill fresh tensors made inside the package with NaN or absurd integers, so an unwritten element shows."""
    for holder, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
        (Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(holder, name, _poisoning(getattr(holder, name)))


def _poisoning(make: Callable) -> Callable:
    def make_poisoned(*args, **kwargs):
        out = make(*args, **kwargs)
        if torch.compiler.is_compiling():
            return out
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] == PACKAGE and type(out) is Tensor and out.device.type != "meta":
            poison_(out)
        return out

    return make_poisoned


def poison_(tensor: Tensor) -> Tensor:
    """Overwrite a tensor with NaN (floats), a large negative number (integers) or True (bool)."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if not tensor.is_floating_point():
        return tensor.fill_(torch.iinfo(tensor.dtype).max // 2 + 11)
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)
        return tensor
    return tensor.fill_(float("nan"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for ``backend`` once for each kernel its ops have (``tests/ops/test_<stem>*.py``)."""
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", _backends(metafunc.definition.path.stem), indirect=True)


def _backends(test_stem: str) -> list:
    ops = [name for name, record in OPS.items() if test_stem.startswith(f"test_{_stem(record)}")]
    if INTERPRETED:
        return [pytest.param("interpret" if any(OPS[name].triton for name in ops) else "reference")]
    params = [pytest.param("reference")]
    if _native.load_errors["_C"] is not None:
        params.append(pytest.param("cpu", marks=pytest.mark.skip(reason=f"_C: {_native.load_errors['_C']}")))
    elif any(_has_kernel(name, "CPU") for name in ops):
        params.append(pytest.param("cpu"))
    if torch.cuda.is_available() and any(_has_kernel(name, "CUDA") for name in ops):
        params.append(pytest.param("cuda", marks=pytest.mark.gpu))
    return params


def _stem(record) -> str:
    return record.reference.__module__.rpartition(".")[2]


def _has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix(name), key)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name the kernel the public op dispatches to: ``reference``, ``cpu`` (native), ``interpret`` (Triton) or ``cuda``.

    Under ``reference`` and ``interpret`` the native CPU kernels are overridden in the dispatcher for the length of the
    test, so the same public call, `opcheck` and `torch.compile` all meet the reference, or the Triton launcher.
    """
    if request.param not in ("reference", "interpret"):
        yield request.param
        return
    library = torch.library.Library(NAMESPACE, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, record in OPS.items():
            if request.param == "interpret" and record.triton is not None:
                library.impl(name, _lazy_launcher(record.triton), "CPU")
            elif _has_kernel(name, "CPU"):
                library.impl(name, record.reference, "CPU")
    yield request.param
    library._destroy()


@pytest.fixture
def device(backend: str) -> torch.device:
    """Where a backend's tensors live."""
    return torch.device("cuda" if backend == "cuda" else "cpu")
