"""Hugging Face models: `speculative_generate` for ``model.generate``, `HFTarget`, and what is supported.

Names are resolved at first use: importing this package, or `load` from it, does not import transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import TreeCache
    from .families import FAMILIES, check_supported
    from .generate import speculative_generate
    from .load import load_model, load_tokenizer
    from .target import HFTarget

_MODULES = {
    "FAMILIES": "families",
    "HFTarget": "target",
    "TreeCache": "cache",
    "check_supported": "families",
    "load_model": "load",
    "load_tokenizer": "load",
    "speculative_generate": "generate",
}

__all__ = [
    "FAMILIES",
    "HFTarget",
    "TreeCache",
    "check_supported",
    "load_model",
    "load_tokenizer",
    "speculative_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
