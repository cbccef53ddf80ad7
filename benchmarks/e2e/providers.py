"""Providers of this interpreter: transformers' ``generate`` and its own speculation, and our drafters.

A loader takes the settings of `compare` and returns a `Provider`; it runs in a process of its own.
"""

import math
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._inductor.config as inductor
from torch import Tensor
from transformers import CompileConfig, StaticCache, StoppingCriteria

from benchmarks.e2e.catalogue import BUDGET, drafter_of
from benchmarks.e2e.worker import Decoded, Provider
from specdec_kernels.cli import _drafters
from specdec_kernels.decoding.calibration import Calibration, Setting
from specdec_kernels.decoding.stats import DecodeStats
from specdec_kernels.hf._compat import cache_argument
from specdec_kernels.hf.generate import speculative_generate
from specdec_kernels.hf.load import load_model
from specdec_kernels.hf.prepare import prepare

# transformers' own speculation takes batches of one.
OPTIONS = {
    "hf-lookup": {"prompt_lookup_num_tokens": 10},
    "hf-early-exit": {"assistant_early_exit": 8},
}
# Enough to compile a step: there is one after the prompt's pass.
COMPILE_PROMPT, COMPILE_TOKENS = 24, 4


def hugging_face(settings: SimpleNamespace) -> Provider:
    """Load ``model.generate``, plain or with one of `OPTIONS`."""
    model = _load(settings)
    passes = _count_passes(model)

    def decode(prompts: list[list[int]], max_new_tokens: int) -> Decoded:
        passes.clear()
        inputs, first = left_padded(prompts, settings.pad_id), FirstToken()
        options = {"max_new_tokens": max_new_tokens, "do_sample": False, **OPTIONS.get(settings.name, {})}
        ids = model.generate(**inputs, **options, stopping_criteria=[first])
        texts = texts_of(ids, inputs, settings.eos_ids)
        return Decoded(texts, len(passes) - 1, 1.0 if settings.name == "generate" else None, first.at)

    def gaps(prompts: list[list[int]], queries: list[list[int]]) -> list[float]:
        inputs = left_padded(prompts, settings.pad_id)
        longest = max(position for _, position, _, _ in queries)
        run = model.generate(
            **inputs, max_new_tokens=longest + 1, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        return [bf16_gap(run.logits[position][row], first, other) for row, position, first, other in queries]

    return Provider(decode, gaps=gaps)


def hugging_face_compiled(settings: SimpleNamespace) -> Provider:
    """Load ``model.generate`` whose steps inductor has compiled, weights frozen into them; prompts run eagerly.

    That is how ``generate`` compiles by itself: one graph, for one token behind a cache of fixed size.
    """
    # As an option of torch.compile it would come too late: whether weights are constants is decided by the tracer.
    inductor.freezing = True
    model = _load(settings)
    compile_config = CompileConfig(fullgraph=True, dynamic=False, mode="default")
    compile_config._compile_all_devices = True  # not only GPUs
    # A frozen graph goes on reading and writing the cache that it was traced with, so all calls share this one.
    cache = StaticCache(config=model.config, max_cache_len=settings.max_length)
    options = {"do_sample": False, "compile_config": compile_config, cache_argument(model): cache}

    def decode(prompts: list[list[int]], max_new_tokens: int) -> Decoded:
        inputs, first = left_padded(prompts, settings.pad_id), FirstToken()
        cache.reset()
        ids = model.generate(**inputs, **options, max_new_tokens=max_new_tokens, stopping_criteria=[first])
        texts = texts_of(ids, inputs, settings.eos_ids)
        return Decoded(texts, max(map(len, texts)) - 1, 1.0, first.at)

    start = time.perf_counter()
    decode([list(range(1, COMPILE_PROMPT + 1))] * settings.batch_size, COMPILE_TOKENS)
    return Provider(decode, {"compiled_in_s": round(time.perf_counter() - start, 1)})


def ours(settings: SimpleNamespace) -> Provider:
    """Load one of our drafters behind ``model.generate``, on a prepared model if asked."""
    model = _load(settings)
    for name in ("heads", "adapter", "skips"):
        value = getattr(settings, name, None)
        setattr(settings, name, Path(value) if value else None)
    if settings.prepare:
        prepare(model)
    name = drafter_of(settings.name)
    drafter, budget = _drafters.make(name, settings, model), None
    if settings.name.endswith(BUDGET):
        setting = Setting.here(model.device, model.dtype, prepared=settings.prepare)
        budget = Calibration.load(_drafters.folder_of("heads", settings), setting).budget(name)

    def decode(prompts: list[list[int]], max_new_tokens: int) -> Decoded:
        inputs, stats = left_padded(prompts, settings.pad_id), DecodeStats()
        extra = {"custom_generate": speculative_generate, "drafter": drafter, "stats": stats, "budget": budget}
        ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **extra)
        first_token_at = time.perf_counter() - (stats.total_time_us - stats.phase_time_us["prefill"]) / 1e6
        texts = texts_of(ids, inputs, settings.eos_ids)
        return Decoded(texts, stats.num_steps, stats.tokens_per_step, first_token_at)

    return Provider(decode)


class FirstToken(StoppingCriteria):
    """Look at the clock when there is a first token; end nothing."""

    at: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **_) -> Tensor:
        self.at = time.perf_counter() if self.at is None else self.at
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _load(settings: SimpleNamespace):
    torch.set_num_threads(settings.threads)
    return load_model(settings.folder, dtype=getattr(torch, settings.dtype))


def _count_passes(model) -> list[None]:
    """Return a list that grows by one at each pass through the last layer, which a draft's early exit leaves out."""
    passes: list[None] = []
    model.model.layers[-1].register_forward_pre_hook(lambda *_: passes.append(None))
    return passes


def left_padded(prompts: list[list[int]], pad_id: int) -> dict[str, Tensor]:
    """Return ``input_ids`` and ``attention_mask`` of a batch."""
    longest = max(map(len, prompts))
    rows = [[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def texts_of(ids: Tensor, inputs: dict[str, Tensor], eos_ids: list[int]) -> list[list[int]]:
    """Return the new tokens of each row up to and with its EOS."""
    rows = ids[:, inputs["input_ids"].shape[1] :].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in eos_ids), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def bf16_gap(logits: Tensor, first: int, other: int) -> float:
    """Return how far apart the logits of two tokens are, in units in the last place of bf16 of the greater one."""
    a, b = float(logits[first]), float(logits[other])
    return abs(a - b) / 2.0 ** (math.floor(math.log2(max(abs(a), abs(b), 1e-30))) - 7)
