"""Random models of every supported family, small, but with each family's peculiarities turned on and strong."""

from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 97
WINDOW = 6  # shorter than the sequences of the tests

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # The usual 0.02 gives scores so small that a window or a soft cap changes nothing.
    "initializer_range": 0.15,
}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
# The default kernel for experts has no fp64.
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
_QWEN_EXPERTS = {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 1}

OPTIONS: dict[str, dict] = {
    "gemma": {"num_key_value_heads": 1, "head_dim": 24},
    "gemma2": {
        **_ALTERNATING,
        "head_dim": 24,
        "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": {**_ALTERNATING, "head_dim": 24, "query_pre_attn_scalar": 9},
    "gpt_oss": {
        **_ALTERNATING,
        **_EXPERTS,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "granite": {
        "attention_multiplier": 0.6,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 2.0,
    },
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, **_EXPERTS},
    "olmo2": {},
    "phi3": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen2_moe": {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {**_QWEN_EXPERTS, "head_dim": 24},
    "smollm3": {"no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 2},
    "starcoder2": {"sliding_window": WINDOW},
}


def tiny_model(model_type: str = "llama", **options) -> PreTrainedModel:
    """Build a random model in fp32, with the attention ``eager`` unless said otherwise."""
    settings = {**_BASE, **OPTIONS[model_type], "attn_implementation": "eager", **options}
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, attn_implementation=settings["attn_implementation"]).eval()


def path_logits(model: PreTrainedModel, prompt: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    """Return the model's own logits ``(len, V)`` for one sequence, without a cache."""
    with torch.no_grad():
        return model(torch.cat([prompt, *more]).unsqueeze(0), use_cache=False).logits[0]


def record_calls(function: Callable) -> tuple[Callable, list[dict]]:
    """Wrap a function so that the keywords of its calls are kept."""
    calls: list[dict] = []

    def recording(*args, **kwargs):
        calls.append({"args": args, **kwargs})
        return function(*args, **kwargs)

    return recording, calls
