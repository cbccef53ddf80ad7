"""Which options of ``generate`` speculative decoding refuses, and why. Everything else works as it does there."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import GenerationMode

# Keywords that ``generate`` prepares and that are dealt with here; a model input of any other name is refused.
_KNOWN_INPUTS = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "num_logits_to_keep")
_CACHE_INPUTS = ("cache", "past_key_values")

# Processors that keep a state of their own, one call a token; here a token may be looked at and then rejected.
_STATEFUL_PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale (it runs the model once more for each token)",
    "SynthIDTextWatermarkLogitsProcessor": "SynthID watermarks (their state counts the calls)",
}


def check_options(config: GenerationConfig, processors: LogitsProcessorList, model_kwargs: dict[str, Any]) -> None:
    """Raise NotImplementedError, naming the option, unless speculation gives what ``generate`` would."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        _refuse(f"{str(mode.value).replace('_', ' ')} (greedy search and sampling are supported)")
    if config.use_cache is False:
        _refuse("use_cache=False")
    if config.cache_implementation not in (None, "dynamic", "static"):
        _refuse(f"cache_implementation={config.cache_implementation!r}; it has a cache of its own")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            _refuse(f"{name}=True")
    for processor in processors:
        if type(processor).__name__ in _STATEFUL_PROCESSORS:
            _refuse(_STATEFUL_PROCESSORS[type(processor).__name__])
    _check_inputs(model_kwargs)


def _check_inputs(model_kwargs: dict[str, Any]) -> None:
    for name, value in model_kwargs.items():
        if name in _CACHE_INPUTS:
            if value is not None and (getattr(value, "_is_user_defined", False) or value.get_seq_length() > 0):
                _refuse(f"a cache of the caller's ({name}=...)")
        elif name not in _KNOWN_INPUTS and value is not None:
            _refuse(f"the model input {name!r}; prompts are input_ids and attention_mask")


def _refuse(what: str) -> None:
    raise NotImplementedError(f"speculative decoding does not support {what}")


def right_padded(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Turn the left-padded prompts of ``generate`` into right-padded ones and their lengths.

    Args:
        input_ids: ``(B, P)``.
        attention_mask: ``(B, P)``, or None when nothing is padded.
        position_ids: what ``generate`` prepared, or what the caller gave.

    Returns:
        Ids ``(B, L) int64`` with what was padding behind the prompt, and lengths ``(B,) int32``.

    Raises:
        ValueError: ones that are not all at the end of a row, or a row without any.
        NotImplementedError: positions that do not count the prompt's tokens from 0.
    """
    batch, width = input_ids.shape
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"speculative_generate: attention_mask must have shape {(batch, width)}, got {tuple(mask.shape)}"
        )
    lengths = (mask != 0).sum(1)
    columns = torch.arange(width, device=input_ids.device)
    is_prompt = columns >= width - lengths[:, None]
    if not bool(((mask != 0) == is_prompt).all()) or not bool((lengths > 0).all()):
        raise ValueError(
            "speculative_generate: attention_mask must be left-padded (zeros, then at least one 1, in each row); "
            "set padding_side='left' when tokenizing"
        )
    expected = (columns - (width - lengths[:, None])).clamp_min(0)
    if position_ids is not None and not bool((position_ids == expected)[is_prompt].all()):
        _refuse("position_ids other than 0, 1, 2, … from each prompt's first token")
    order = (columns + width - lengths[:, None]) % width
    longest = int(lengths.max()) if batch else 0
    return input_ids.gather(1, order)[:, :longest].to(torch.int64), lengths.to(torch.int32)
