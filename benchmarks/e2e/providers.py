"""Who decodes in `benchmarks.e2e.compare`: ``model.generate`` as it is, its own speculation, and our drafters."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from specdec_kernels.cli import _drafters
from specdec_kernels.decoding.stats import DecodeStats
from specdec_kernels.hf.generate import speculative_generate


class Decoded(NamedTuple):
    """What a provider gave for a batch: ids with the prompts ``(B, P + new)``, and its statistics if it has any."""

    ids: Tensor
    stats: DecodeStats | None


Provider = Callable[[dict, dict], Decoded]

OURS = _drafters.NAMES
# transformers' own speculation takes batches of one.
THEIRS = {"hf-lookup": {"prompt_lookup_num_tokens": 10}, "hf-early-exit": {"assistant_early_exit": 8}}


def provider(name: str, model, args) -> Provider:
    """Return the function ``(inputs, options) → Decoded`` of a provider: ``generate``, or a name of THEIRS or OURS."""
    if name in OURS:
        drafter = _drafters.make(name, args, model)

        def ours(inputs: dict, options: dict) -> Decoded:
            stats = DecodeStats()
            extra = {"custom_generate": speculative_generate, "drafter": drafter, "stats": stats}
            return Decoded(model.generate(**inputs, **options, **extra), stats)

        return ours
    extra = {} if name == "generate" else THEIRS[name]
    return lambda inputs, options: Decoded(model.generate(**inputs, **options, **extra), None)
