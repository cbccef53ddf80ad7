"""Which model families are supported, what is special about each, and why others are refused.

Supported means tested: chains give the logits of the model's own attention, trees those of their paths. A family works
when its attention goes through ``AttentionInterface``, caches plain K and V for every layer, and asks for nothing but
a scale, a soft cap, a window or sinks.
"""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

# model_type → what differs from Llama.
FAMILIES: dict[str, str] = {
    "gemma": "GeGLU, one KV head (MQA), head size not hidden/heads",
    "gemma2": "soft cap on scores and on logits, every other layer has a window, scale from query_pre_attn_scalar",
    "gemma3_text": "five of six layers have a window and a RoPE of their own, q/k norm",
    "gpt_oss": "attention sinks, every other layer has a window, experts",
    "granite": "own attention scale, residual and logits multipliers",
    "llama": "",
    "mistral": "window on all layers",
    "mixtral": "window on all layers, experts",
    "olmo2": "q/k norm over all heads, norms after the blocks",
    "phi3": "fused q/k/v projection, window on all layers, partial RoPE",
    "qwen2": "biases on q/k/v; a window on the upper layers when use_sliding_window",
    "qwen2_moe": "biases on q/k/v, experts",
    "qwen3": "q/k norm per head; head size not hidden/heads",
    "qwen3_moe": "q/k norm per head, experts",
    "smollm3": "every fourth layer without RoPE",
    "starcoder2": "biases, layer norm, window on all layers",
}

# Layers whose cache is one K row and one V row for each token.
_LAYER_TYPES = ("full_attention", "sliding_attention")

# Config attributes that, when set, mean a cache or a mask of another kind.
_REFUSED_ATTRIBUTES = {
    "is_encoder_decoder": "encoder-decoder models (a cross-attention cache cannot be rolled back with the decoder's)",
    "add_cross_attention": "cross-attention layers",
    "kv_lora_rank": "multi-head latent attention (MLA): K and V differ in head size",
    "num_kv_shared_layers": "layers that share the K and V of another layer",
    "attention_chunk_size": "chunked attention",
    "use_bidirectional_attention": "bidirectional attention",
    "alibi": "ALiBi position biases",
}


def check_supported(model: PreTrainedModel, capacity: int | None = None) -> None:
    """Raise unless speculative decoding with a `TreeCache` gives what the model itself would.

    Args:
        model: any object; only its config and the places of its weights are read.
        capacity: the longest sequence that will be decoded; needed to judge RoPE variants that change with the length.

    Raises:
        TypeError: not a transformers model.
        NotImplementedError: says what is not supported.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers.PreTrainedModel, got {type(model).__name__}; of a wrapped model (PEFT, "
            "torch.compile) give the model inside"
        )
    config = model.config
    reason = (
        _refused_structure(config)
        or _refused_class(model)
        or _refused_rope(config, capacity)
        or _refused_placement(model)
    )
    if reason is not None:
        raise NotImplementedError(f"speculative decoding does not support {reason}")


def _refused_structure(config: PreTrainedConfig) -> str | None:
    for name, what in _REFUSED_ATTRIBUTES.items():
        if getattr(config, name, None):
            return f"{what}; {config.model_type} has {name}={getattr(config, name)}"
    for index, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type not in _LAYER_TYPES:
            return (
                f"layers of type {layer_type!r} (layer {index} of {config.model_type}): their state cannot be rolled "
                f"back; supported are {' and '.join(_LAYER_TYPES)}"
            )
    return None


def _refused_class(model: PreTrainedModel) -> str | None:
    if model.config.model_type not in FAMILIES:
        return f"model type {model.config.model_type!r} (supported: {', '.join(sorted(FAMILIES))})"
    if model.get_output_embeddings() is None:
        return f"{type(model).__name__}, which has no vocabulary projection"
    return None


def _refused_rope(config: PreTrainedConfig, capacity: int | None) -> str | None:
    """Refuse to cross the length at which ``dynamic`` and ``longrope`` change the angles of keys already cached."""
    for rope in _rope_parameters(config):
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if _follows_length(rope) and capacity is not None and capacity > limit:
            return (
                f"{rope['rope_type']!r} RoPE past its original length {limit} (the angles of cached keys would "
                f"change), got a capacity of {capacity}"
            )
    return None


def reads_positions(config: PreTrainedConfig) -> bool:
    """Say whether the model looks at the positions on the host, which waits for a device, to choose its angles."""
    return any(map(_follows_length, _rope_parameters(config)))


def _follows_length(rope: dict[str, Any]) -> bool:
    kind = rope.get("rope_type", "default")
    return "dynamic" in kind or kind == "longrope"


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _refused_placement(model: PreTrainedModel) -> str | None:
    devices: set[torch.device] = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"a model spread over several devices ({', '.join(sorted(map(str, devices)))})"
    return None
