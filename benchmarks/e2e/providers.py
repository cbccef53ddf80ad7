"""Who decodes in `benchmarks.e2e.compare`: ``model.generate`` as it is, its own speculation, and our drafters."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from specdec_kernels.decoding.drafters import MedusaDrafter
from specdec_kernels.decoding.stats import DecodeStats
from specdec_kernels.hf.generate import speculative_generate


class Decoded(NamedTuple):
    """What a provider gave for a batch: ids with the prompts ``(B, P + new)``, and its statistics if it has any."""

    ids: Tensor
    stats: DecodeStats | None


Provider = Callable[[dict, dict], Decoded]

# transformers' own prompt lookup takes batches of one, and so does its early exit.
LOOKUP_TOKENS, EXIT_LAYER = 10, 8
THEIRS = {
    "hf_lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
    "hf_early_exit": {"assistant_early_exit": EXIT_LAYER},
}
OURS: dict[str, Callable] = {
    "plain": lambda model, args: None,
    "medusa": lambda model, args: MedusaDrafter.from_pretrained(args.heads, model),
}


def provider(name: str, model, args) -> Provider:
    """Return the function ``(inputs, options) → Decoded`` of a provider: ``generate``, or a name of THEIRS or OURS."""
    if name in OURS:
        drafter = OURS[name](model, args)

        def ours(inputs: dict, options: dict) -> Decoded:
            stats = DecodeStats()
            extra = {"custom_generate": speculative_generate, "drafter": drafter, "stats": stats}
            return Decoded(model.generate(**inputs, **options, **extra), stats)

        return ours
    extra = {} if name == "generate" else THEIRS[name]
    return lambda inputs, options: Decoded(model.generate(**inputs, **options, **extra), None)
