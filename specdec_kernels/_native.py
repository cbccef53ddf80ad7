"""Load the native extensions, and remember why one is missing.

Importing never fails because of them: without native kernels every op runs on its reference.
``SPECDEC_NATIVE=0`` turns them off.
"""

import importlib
import os
from pathlib import Path

import torch

# Extension name -> why it is not loaded, None when it is. Read by `specdec-kernels doctor`.
load_errors: dict[str, str | None] = {}


def _load(name: str, load) -> None:
    found = any(Path(__file__).parent.glob(f"{name}.*"))
    if os.environ.get("SPECDEC_NATIVE", "1") == "0":
        load_errors[name] = "turned off by SPECDEC_NATIVE=0"
    elif not found:
        load_errors[name] = "not built (no compiler at install time, or SPECDEC_BUILD=none; see the install log)"
    elif name == "_C_cuda" and torch.version.cuda is None:
        load_errors[name] = f"torch {torch.__version__} is built without CUDA"
    else:
        try:
            load()
            load_errors[name] = None
        except (ImportError, OSError, RuntimeError) as error:
            load_errors[name] = str(error).strip().splitlines()[0]


def _load_cuda() -> None:
    for path in Path(__file__).parent.glob("_C_cuda*.so"):
        torch.ops.load_library(str(path))


def load_native() -> None:
    """Load ``_C`` (CPU kernels, schemas) and ``_C_cuda``; record errors in ``load_errors``."""
    _load("_C", lambda: importlib.import_module("._C", __package__))
    _load("_C_cuda", _load_cuda)


def native_module():
    """Return the pybind11 module of the CPU extension, or None when it is not loaded."""
    return importlib.import_module("._C", __package__) if load_errors.get("_C", "") is None else None
