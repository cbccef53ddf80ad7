"""What differs between the versions of transformers (5.0 and later); nothing outside this file may know."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

# 5.24 renamed the argument. A version that has only the other name swallows the wrong one without a word, and the
# model then runs on a cache of its own.
_CACHE_ARGUMENTS = ("cache", "past_key_values")


def cache_argument(model: nn.Module) -> str:
    """Return the name under which the model's ``forward`` takes its cache.

    Raises:
        NotImplementedError: ``forward`` has no such argument.
    """
    parameters = inspect.signature(type(model).forward).parameters
    for name in _CACHE_ARGUMENTS:
        if name in parameters:
            return name
    raise NotImplementedError(
        f"{type(model).__name__}.forward takes no cache: none of {', '.join(_CACHE_ARGUMENTS)} is among its arguments"
    )


def attention_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the distinct configs that the model's modules read their attention implementation from."""
    configs = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs[id(config)] = config
    return list(configs.values())


@contextmanager
def attention_implementation(configs: list[PreTrainedConfig], name: str) -> Iterator[None]:
    """Select a registered attention implementation inside the block, and what it was before afterwards.

    ``PreTrainedModel.set_attn_implementation`` does the same for good; it walks over all modules, which costs 0.25 ms
    a call on a 30-layer model, twice a step.
    """
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, previous in zip(configs, before, strict=True):
            config._attn_implementation = previous


def unpacked_gguf(file_name: str) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that read a GGUF file into ordinary weights.

    Versions that know ``GgufConfig`` keep the weights packed where they find a kernel for them, which leaves nothing
    that a draft head could share.
    """
    arguments: dict[str, Any] = {"gguf_file": file_name}
    if hasattr(transformers, "GgufConfig"):
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return arguments
