"""``specdec-kernels demo``: decode a few prompts plainly and speculatively on this machine, and compare."""

import copy
import time
from dataclasses import dataclass

import torch

from ..hf.load import PACKAGED_MODEL
from . import _drafters
from ._arguments import add_prepare_argument, device, not_negative, positive_int, prepares

PROMPTS = (
    "Explain in a few sentences why the sky is blue during the day and red in the evening.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it step by step.",
    "List ten practical tips for someone who starts growing vegetables on a balcony.",
)


@dataclass
class Comparison:
    """One prompt, decoded twice."""

    plain_ids: list[int]
    speculative_ids: list[int]
    plain_s: float
    speculative_s: float

    @property
    def first_difference(self) -> int | None:
        """Position of the first token that differs, None when the texts are equal."""
        pairs = zip(self.plain_ids, self.speculative_ids, strict=False)
        differing = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if differing is None and len(self.plain_ids) != len(self.speculative_ids):
            return min(len(self.plain_ids), len(self.speculative_ids))
        return differing


def add_arguments(parser) -> None:
    """Declare the options of the demo."""
    parser.add_argument("--prompt", action="append", help="a user message; may be given several times")
    parser.add_argument("--model", default=PACKAGED_MODEL, help="'smollm2', a folder, a .gguf file, or a hub id")
    parser.add_argument("--drafter", choices=_drafters.NAMES, default="medusa", help="default: medusa")
    _drafters.add_arguments(parser)
    parser.add_argument("--max-new-tokens", type=positive_int, default=128)
    parser.add_argument("--temperature", type=not_negative, default=0.0, help="0 decodes greedily")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling, when the temperature is above 0")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", type=device, default="cpu", help="cpu or cuda")
    add_prepare_argument(parser, "speculate on a prepared copy")


def run(args) -> int:
    """Load the model and the drafter, decode every prompt twice, print the table and, when it is fixed, the tree."""
    from transformers.utils import logging

    from ..hf.load import load_model, load_tokenizer

    logging.disable_progress_bar()
    _drafters.check(args.drafter, args)
    try:
        prepared = prepares(args)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(f"loading {args.model} ({args.dtype}) ...", flush=True)
    model = load_model(args.model, dtype=getattr(torch, args.dtype), device=args.device)
    tokenizer = load_tokenizer(args.model)
    drafter = _drafters.make(args.drafter, args, model)
    models = model, _prepared_copy(model) if prepared else model
    _decode_both(models, drafter, _encode(tokenizer, "Hello"), args, None, max_new_tokens=8)
    comparisons, stats = [], None
    for prompt in args.prompt or PROMPTS:
        print(f"\n> {prompt}\n", flush=True)
        comparison, stats = _decode_both(models, drafter, _encode(tokenizer, prompt), args, tokenizer, stats=stats)
        comparisons.append(comparison)
    verdict = _verdict(comparisons, args.temperature > 0, args.dtype)
    _print_table(comparisons, stats, drafter, verdict, prepared)
    return 0


def _prepared_copy(model):
    """Return a prepared copy, so that plain decoding stays what it is without."""
    from ..hf.prepare import prepare

    return prepare(copy.deepcopy(model))


def _encode(tokenizer, prompt: str) -> dict[str, torch.Tensor]:
    if tokenizer.chat_template is None:
        return dict(tokenizer(prompt, return_tensors="pt"))
    messages = [{"role": "user", "content": prompt}]
    return dict(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    )


def _decode_both(models, drafter, inputs, args, tokenizer, *, stats=None, max_new_tokens=None):
    """Decode a prompt plainly with the first model, then speculatively with the second one.

    The speculative text streams when a tokenizer is given.
    """
    from transformers import TextStreamer

    from ..decoding.stats import DecodeStats
    from ..hf.generate import speculative_generate

    inputs = {name: tensor.to(args.device) for name, tensor in inputs.items()}
    options = {"max_new_tokens": max_new_tokens or args.max_new_tokens, "do_sample": args.temperature > 0}
    if args.temperature > 0:
        options["temperature"] = args.temperature
    stats = stats or DecodeStats()
    torch.manual_seed(args.seed)
    model, fast = models
    plain_s, plain = _timed(lambda: model.generate(**inputs, **options), args.device)
    options |= {"custom_generate": speculative_generate, "drafter": drafter, "stats": stats, "seed": args.seed}
    if tokenizer is not None:
        options["token_streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    speculative_s, ours = _timed(lambda: fast.generate(**inputs, **options), args.device)
    prompt_len = inputs["input_ids"].shape[1]
    return Comparison(plain[0, prompt_len:].tolist(), ours[0, prompt_len:].tolist(), plain_s, speculative_s), stats


def _timed(function, device: torch.device):
    start = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def _print_table(comparisons: list[Comparison], stats, drafter, verdict: str, prepared: bool) -> None:
    """Print tokens/s, speed-up, tokens per step, equality, and the draft tree."""
    from ..tree import DraftTree, draw_text

    tree = getattr(drafter, "tree", None)
    fixed = not tree or isinstance(tree, DraftTree)
    plain = sum(len(c.plain_ids) for c in comparisons) / sum(c.plain_s for c in comparisons)
    ours = sum(len(c.speculative_ids) for c in comparisons) / sum(c.speculative_s for c in comparisons)
    rows = [
        ("plain model.generate", f"{plain:.1f} tokens/s"),
        ("speculative, model prepared" if prepared else "speculative", f"{ours:.1f} tokens/s"),
        ("speed-up", f"{ours / plain:.2f} x{' (what `prepare` alone brings: --drafter plain)' if prepared else ''}"),
        ("mean accepted drafts per step", f"{stats.mean_accepted:.2f} ({stats.tokens_per_step:.2f} tokens per step)"),
        ("tree size", f"{drafter.max_nodes} nodes at most{'' if fixed else ', the likeliest at each step'}"),
        ("output identical", verdict),
    ]
    print("\n" + "\n".join(f"{name:<32}{value}" for name, value in rows))
    if isinstance(tree, DraftTree):
        print("\ndraft tree (node numbers; children are ranked candidates)\n")
        print(draw_text(tree))


def _verdict(comparisons: list[Comparison], sampled: bool, dtype: str) -> str:
    if sampled:
        return "not compared: sampled runs agree in distribution, not token for token"
    places = [(i, c.first_difference) for i, c in enumerate(comparisons, 1) if c.first_difference is not None]
    if not places:
        return "yes"
    found = "no: " + ", ".join(f"prompt {i} first differs at token {where}" for i, where in places)
    return found if dtype == "float32" else f"{found} ({dtype} rounds near-ties either way; --dtype float32 does not)"
